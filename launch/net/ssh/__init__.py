"""`thinpipe launch`: a run on several machines from one, over ssh."""
