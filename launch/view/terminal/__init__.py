"""What a run shows while it runs and at its end: a live panel on a terminal, lines elsewhere."""
