"""Output of a run while it runs and at its end: a live panel on a terminal, lines elsewhere."""
