"""Planning before a run: `simulate` predicts one training step, event by event."""
