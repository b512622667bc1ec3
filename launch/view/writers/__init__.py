"""A run's numbers in other tools, beside `metrics.jsonl`; a file per tool, named as its setting."""
