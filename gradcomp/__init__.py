"""What replicas of a stage exchange: a file per method in `methods/`."""
