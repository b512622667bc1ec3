"""Bytes on a link: codecs without memory (`cast.py`, `uniform.py`), message headers, kernels.

Shared by `aqsgd` (activations) and `gradcomp` (parameter updates), of which it imports nothing.
Also what engines encode and send with during training: a thread (`thread.py`), a CUDA stream
(`stream.py`), pinned memory (`pinned.py`).
"""
