"""The KernelSet contract and the choice of a backend.

Layout of a row of N values at b bits (block-planar). The row is cut into blocks of 1024 values; the
last block may be shorter and is padded to a multiple of 8 values. A block is 8 planes of L lanes
(L = 128, in the last block ceil(rest / 8)): value e of a block is in plane e // L, lane e % L. The
b-bit codes are split into fields of 8, 4, 2 and 1 bits, widest first and from the low bits up (6 =
4 + 2), and a w-bit field of a block becomes w rows of L bytes: byte row r holds planes r, r + w,
r + 2w, ..., each shifted by w more bits. So a row takes b * ceil(N / 8) bytes for every b, with no
bit stream and no shuffle.

Codes are offset binary: code = q + 2^(b-1), value = q * scale, q in [-2^(b-1), 2^(b-1) - 1]. The
sign of the scale turns the longer side of this range towards the group's largest magnitude. With
bf16 scales the product is exact in fp32, whatever the hardware fuses.

Random numbers: Philox4x32-10 (Salmon et al., SC'11), key = `Noise.key`, counter = (128 * block +
lane, row number low, row number high, step); the four words give 8 numbers of 16 bits, low half
first: one per plane.
"""

from typing import Literal, Protocol

from torch import Tensor

from pipeline.wire.codec import Noise
from pipeline.wire.kernels import reference

BLOCK = 1024
PLANES = 8

Backend = Literal["auto", "reference"]


class KernelSet(Protocol):
    """Functions every backend offers; all outputs are preallocated and fully written.

    Axes: B rows, N values, K = ceil(N / group) groups, P = bits * ceil(N / 8) payload bytes.
    """

    def quantize(
        self,
        x_BN: Tensor,
        payload_BP: Tensor,
        scale_BK: Tensor,
        *,
        bits: int,
        group: int,
        noise: Noise | None,
    ) -> None:
        """Write codes and scales (bf16 or fp32); rounds stochastically if `noise` is given."""

    def dequantize(
        self, payload_BP: Tensor, scale_BK: Tensor, out_BN: Tensor, *, bits: int, group: int
    ) -> None:
        """Write the values that codes and scales stand for."""


def load_kernels(backend: Backend) -> KernelSet:
    """Return the backend's functions; "auto" takes the fastest one there is."""
    kernels: dict[str, KernelSet] = {"auto": reference, "reference": reference}
    return kernels[backend]
