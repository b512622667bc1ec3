"""`thinpipe watch`: a run in a browser, from what its folder holds."""
