"""Faults injected on purpose, counted by what became of them: `python -m benchmarks.chaos`."""
