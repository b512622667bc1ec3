"""Planning before a run: `simulate` foretells one training step, event by event."""
