"""One file per method; the file's name is the method's name in a config."""
