"""Signs and mean magnitudes: the SignKernels contract and the choice of a backend.

Magnitudes of a group are added in fp32, that of value e to sum e % 8, in order; then sums i and
i + 4 are added, i and i + 2, i and i + 1. The mean, which is the total divided by the number of
values, is rounded to bf16, to nearest, ties to even, and NaN if it is not finite.
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels import Backend, backend_module

_MODULES = {"reference": "reference.sign_mean", "numba": "cpu.sign_mean"}


class SignKernels(Protocol):
    """Functions every backend offers, equal bit for bit; outputs are preallocated, fully written.

    Axes: N values (fp32, contiguous), K = ceil(N / group) scales (bf16), S = ceil(N / 8) bytes.
    """

    def encode(self, x_N: Tensor, group: int, scale_K: Tensor, sign_S: Tensor) -> None:
        """Write scales and signs; bits past the last value are 0."""

    def decode(
        self, sign_S: Tensor, group: int, scale_K: Tensor, out_N: Tensor, *, add: bool
    ) -> None:
        """Write what they stand for, or add it to what `out_N` holds."""


def load_sign_kernels(backend: Backend, device: torch.device) -> SignKernels:
    """Return a backend's functions; "auto" is numba on CPUs, else the reference.

    Raises:
        ValueError: there are no such kernels for the backend.
    """
    chosen = ("numba" if device.type == "cpu" else "reference") if backend == "auto" else backend
    if chosen not in _MODULES:
        raise ValueError(f'backend = "{backend}": sign kernels are "reference" and "numba"')
    return cast(SignKernels, backend_module(_MODULES[chosen]))
