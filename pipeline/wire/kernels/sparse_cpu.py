"""Sparse kernels on CPUs; the selection is compiled by numba."""

from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.wire.kernels.sparse_reference import gather, place, place_add, scatter, settle
from pipeline.wire.kernels.topk_cpu import select_top

__all__ = ["gather", "place", "place_add", "scatter", "select", "settle"]

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from pipeline.wire.kernels import sparse_cpu
    from pipeline.wire.kernels.sparse import SparseKernels


def select(x_n: Tensor, mask_M: Tensor, kept_k: Tensor) -> None:
    """Mark and copy the largest magnitudes; see `SparseKernels.select`."""
    select_top(x_n, mask_M, kept_k)


if TYPE_CHECKING:
    _checked: SparseKernels = sparse_cpu
