"""What replicas of a stage exchange: one contract (`sync.py`), one file per method (`methods/`)."""
