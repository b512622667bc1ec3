"""Planning before a run: `predict` says how long a step takes, `placement.events` how it goes."""
