"""Bytes on a link: codecs without memory (`cast.py`, `uniform.py`), message headers, kernels.

Shared by `aqsgd` (activations) and `gradcomp` (parameter updates); knows nothing of either. Also
the thread that engines code and send on, `worker.py`.
"""
