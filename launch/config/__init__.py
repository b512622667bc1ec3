"""Run files: what they may say, how they are read, and errors in them."""
