"""`thinpipe init`: a run file to begin with, from what can be found out."""
