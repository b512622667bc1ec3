"""The pipeline engine: stages of a transformer on different ranks, joined by compressed links.

`wire/` turns tensors into bytes; `comm/` moves them over cuts and between replicas; `models/` are
transformers as chains of blocks; `stage.py` joins these to torch's schedules; `engine.py` runs
training and evaluation steps.
"""
