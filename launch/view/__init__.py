"""What a run shows: in the terminal, as a report, and to other tools (`writers/`)."""
