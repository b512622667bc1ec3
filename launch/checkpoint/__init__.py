"""The run folder and its checkpoints: saving, resuming, resharding, export."""
