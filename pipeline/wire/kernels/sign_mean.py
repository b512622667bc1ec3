"""Signs and mean magnitudes: the SignKernels contract.

Magnitudes of a group are added in fp32, that of value e to sum e % 8, in order; then sums i and
i + 4 are added, i and i + 2, i and i + 1. The mean, which is the total divided by the number of
values, is rounded to bf16, to nearest, ties to even, and NaN if it is not finite.
"""

from typing import Protocol

from torch import Tensor


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
