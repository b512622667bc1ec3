"""Tensors as compiled kernels see them: flat numpy arrays, with a row stride.

Axes: B rows, N values.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels import with_contiguous_rows

Window = tuple[Any, int]
"""A flat numpy array and the distance between rows in it."""
NOTHING: Window = (None, 0)
STORED_AS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}  # numpy has no bf16


def readable(x_BN: Tensor) -> Window:
    """Values in a format that kernels read, rows side by side."""
    x_BN = x_BN.detach()
    x_BN = x_BN if x_BN.dtype in STORED_AS else x_BN.float()
    return window(with_contiguous_rows(x_BN))


def writable(out_BN: Tensor) -> Tensor:
    """The tensor itself if kernels can write it, else room that `hand_over` copies from."""
    if out_BN.dtype in STORED_AS and out_BN.stride(1) == 1:
        return out_BN.detach()
    return torch.empty(out_BN.shape)


def hand_over(into_BN: Tensor, out_BN: Tensor) -> None:
    """Bring what was written to `writable` to where it belongs."""
    if into_BN.data_ptr() != out_BN.data_ptr():
        out_BN.copy_(into_BN)


def window(t_BN: Tensor) -> Window:
    """The memory of the rows as one flat array, and the distance between rows in it."""
    rows, numel = t_BN.shape
    assert t_BN.stride(1) == 1 or numel <= 1, "rows must be contiguous"
    row = t_BN.stride(0)
    span = (rows - 1) * row + numel if rows and numel else 0
    stored = t_BN.view(STORED_AS.get(t_BN.dtype, t_BN.dtype))
    # flat, whatever the strides are: numba compiles each kind of array anew
    return stored.as_strided((span,), (1,)).numpy(), row


def kept(fresh_BN: Tensor | None, rows: int) -> tuple[Any, int, Any]:
    """Where new memories go, and a flag per row for whether they are finite."""
    array, row = NOTHING if fresh_BN is None else window(fresh_BN)
    return array, row, np.empty(rows, np.bool_)
