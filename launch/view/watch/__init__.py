"""`thinpipe watch`: a run in a browser, a terminal or a picture, from what its folder holds."""
