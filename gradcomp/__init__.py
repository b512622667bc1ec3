"""Exchange between replicas of a stage: a file per method in `methods/`."""
