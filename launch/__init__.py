"""Command line, configuration, training loop, data, checkpoints, planning and reports."""
