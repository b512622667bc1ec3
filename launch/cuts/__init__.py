"""Where to cut a model: what its blocks and messages cost here, and the best places."""
