"""Chooses stages, replicas, cuts, places, and what is sent, together: `thinpipe plan --place`."""
