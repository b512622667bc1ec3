"""The SparseKernels contract.

A mask holds value e in bit e % 8 of byte e // 8; bits past the last value are 0. Axes: N values of
a vector, n chosen by a subset, R its runs, M = ceil(n / 8) mask bytes, k values kept of the n.
"""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from thinpipe.pipeline.wire.kernels.cpu import sparse as cpu
    from thinpipe.pipeline.wire.kernels.reference import sparse as reference


class SparseKernels(Protocol):
    """Functions every backend offers, equal bit for bit; outputs are preallocated, fully written.

    A subset is its runs: `start_R` (int64, on the CPU, rising multiples of the run) and the length
    of a run, of which the vector's last one may be short of. Kept values are fp32, vectors fp32
    or bf16 and all tensors contiguous.
    """

    def gather(
        self, x_N: Tensor, base_N: Tensor | None, start_R: Tensor, run: int, out_n: Tensor
    ) -> None:
        """Write x, or x - base, at the subset to `out_n` (fp32)."""

    def scatter(self, value_n: Tensor, start_R: Tensor, run: int, out_N: Tensor) -> None:
        """Write fp32 values to the subset's places; others keep what they hold."""

    def select(
        self, x_n: Tensor, mask_M: Tensor, kept_k: Tensor, room_n: Tensor | None = None
    ) -> None:
        """Mark and copy the k fp32 values of largest magnitude, in order; k <= n.

        NaN is above infinity, and of equal magnitudes the first ones are taken. `room_n` (fp32) may
        be overwritten, which saves an allocation.
        """

    def place(self, mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
        """Write kept values to their places in `out_n` (fp32), and zero elsewhere."""

    def place_add(self, mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
        """Add kept values to `out_n` (fp32) at their places."""

    def apply_exchanged(
        self, sent_n: Tensor, mean_n: Tensor, start_R: Tensor, run: int, x_N: Tensor, base_N: Tensor
    ) -> None:
        """At the subset, base becomes base + mean, and x what was not sent above the new base.

        In fp32: left = (x - base) - sent; base += mean, rounded to its format; x = base + left.
        """


if TYPE_CHECKING:  # a backend that drifts fails the type check
    _backends: list[SparseKernels] = [cpu, reference]
