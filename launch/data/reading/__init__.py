"""Files and data sets as people have them: what kind they are of, and their rows or text."""
