"""Benchmarks, one module each; `harness` is what they share, `results/` are the write-ups."""
