"""Entropy coders: zstd (`entropy.py`), rANS (`rans.py`), gaps of sparse masks (`gaps.py`)."""
