"""Tiles of values, some of them rotated: the TileKernels contract.

A row of N values is cut into K = ceil(N / 64) tiles, the last one padded with zeros. A tile of
R x R = 8 x 8 values X, row by row, is rotated to W X^T W / R, where W is the R x R Walsh-Hadamard
matrix: an orthonormal transform that is its own inverse. It is computed as butterflies a + b, a - b
of values R, 2 R, 4 R places apart, in this order, a transposition, the same butterflies again, and
a product with 1 / R, a power of two. Sums of two fp32 values round once whatever the hardware, and
no product precedes them that it could fuse, so every backend makes the same bits.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached

if TYPE_CHECKING:
    from thinpipe.pipeline.wire.kernels.cpu import hadamard as cpu
    from thinpipe.pipeline.wire.kernels.gpu import hadamard as gpu
    from thinpipe.pipeline.wire.kernels.reference import hadamard as reference

SIDE = 8
"""Of a tile's square."""


class Plan(NamedTuple):
    """In which order the tiles of a row are written (int32), and which of them are rotated (uint8).

    Contiguous; `turned_BK` is by the tiles' places in the row.
    """

    order_BK: Tensor
    turned_BK: Tensor


class TileKernels(Protocol):
    """Functions every backend offers; all outputs are preallocated and fully written.

    Axes: B rows, N values, K tiles, G values of a tile. What is cut into tiles is x, or with a
    memory x - memory in fp32. `x_BN` and `out_BN` are quickest in fp32 or bf16 and may have any
    strides, memories are fp32 or bf16; tiles are fp32, and all else is contiguous.
    """

    def survey(
        self, x_BN: Tensor, memory_BN: Tensor | None, peak_BK: Tensor, turned_BK: Tensor
    ) -> None:
        """Write which tiles have a smaller peak (largest magnitude) rotated, and that peak.

        The peak (fp32) of a tile that is not finite is infinite. Such tiles, and those with
        values from 2^100 on, where sums may overflow, stay as they are (`turned_BK`, uint8, 0).
        """

    def gather(self, x_BN: Tensor, memory_BN: Tensor | None, plan: Plan, tiles_BKG: Tensor) -> None:
        """Write tile `order_BK[j]` of each row, rotated if it is turned, to tile j."""

    def scatter(self, tiles_BKG: Tensor, plan: Plan, out_BN: Tensor) -> None:
        """Undo `gather`: write tile j to tile `order_BK[j]` of the row, rotated back."""

    def scatter_change(
        self, tiles_BKG: Tensor, plan: Plan, cached: Cached, out_BN: Tensor | None
    ) -> Tensor:
        """Add tiles to a memory: to `out_BN`, and to the fresh rows rounded to their format.

        These may be the old ones. Returns, bool [B], whether all of a fresh row is finite.
        """


if TYPE_CHECKING:  # a backend that drifts fails the type check
    _backends: list[TileKernels] = [cpu, gpu, reference]
