"""Tiles of values, some of them rotated: the TileKernels contract.

A row of N values is cut into K = ceil(N / 64) tiles, the last one padded with zeros. A tile of
R x R = 8 x 8 values X, row by row, is rotated to W X^T W / R, where W is the R x R Walsh-Hadamard
matrix: an orthonormal transform that is its own inverse. It is computed as butterflies a + b, a - b
of values R, 2 R, 4 R places apart, in this order, a transposition, the same butterflies again, and
a product with 1 / R, a power of two. Sums of two fp32 values round once whatever the hardware, and
no product precedes them that it could fuse, so every backend makes the same bits.
"""

from typing import Protocol

from torch import Tensor

SIDE = 8
"""Of a tile's square."""


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

    def gather(
        self,
        x_BN: Tensor,
        memory_BN: Tensor | None,
        order_BK: Tensor,
        turned_BK: Tensor,
        tiles_BKG: Tensor,
    ) -> None:
        """Write tile `order_BK[j]` (int32) of each row, rotated if it is turned, to tile j."""

    def scatter(
        self, tiles_BKG: Tensor, order_BK: Tensor, turned_BK: Tensor, out_BN: Tensor
    ) -> None:
        """Undo `gather`: write tile j to tile `order_BK[j]` of the row, rotated back."""

    def scatter_change(
        self,
        tiles_BKG: Tensor,
        order_BK: Tensor,
        turned_BK: Tensor,
        memory_BN: Tensor,
        fresh_BN: Tensor,
        out_BN: Tensor | None,
    ) -> Tensor:
        """Add tiles to a memory: to `out_BN`, and to `fresh_BN` rounded to the memory's format.

        Returns, bool [B], whether all of a row's new memory is finite. `fresh_BN` may be
        `memory_BN`.
        """
