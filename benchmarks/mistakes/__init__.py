"""Mistakes of a new user, tried one by one: `python -m benchmarks.mistakes`."""
