"""Output of a run: in the terminal, as a report, and to other tools (`writers/`)."""
