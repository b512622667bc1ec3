"""Run files: their settings, how they are read, and how errors in them are reported."""
