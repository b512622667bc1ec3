"""The Codec contract: values to bytes and back, without memory of past calls.

Axes: B rows (samples), N values per row, W bytes per row.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """Names the random numbers of one `encode` call, so that a replay draws the same ones.

    `key` (64 bits: run seed and place), `step` (32 bits) and one 64-bit number per row, usually the
    sample id, address a counter-based generator; no generator state exists anywhere.
    """

    key: int
    step: int
    row_B: Tensor


class Codec(Protocol):
    """Turns each row of values into a row of bytes, and back. A vector is one row.

    Rows are independent: a row's bytes do not depend on what else is in the batch. `encode` returns
    how many bytes of each row it wrote, counted from the row's start: `capacity` for codecs of
    fixed size, at most that for others (`SparseCodec`), which take one row at a time. With
    `seen_BN` it also writes what the peer's `decode` will produce, bit for bit. NaN or infinity
    never decodes to something finite that hides the fault. All tensors are on one device.
    """

    @property
    def codec_id(self) -> int: ...

    @property
    def bits(self) -> int:
        """Bits per value, scales aside."""

    def capacity(self, numel: int) -> int:
        """Most bytes that a row of `numel` values can take; exact for codecs of fixed size."""

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        """Write the rows' bytes to `wire_BW` (uint8); only stochastic codecs need `noise`."""

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        """Write the rows' values to `out_BN` (any floating dtype)."""


class Cached(NamedTuple):
    """Rows that both ends hold (fp32 or bf16), and where to write what they become."""

    old_BN: Tensor
    fresh_BN: Tensor


class ChangeCodec(Codec, Protocol):
    """Also codes x against cached rows, which become old + change in fp32 at both ends alike.

    Bytes are those of `encode` of x - old. Both return, bool [B], whether all of a fresh row is
    finite.
    """

    def encode_change(
        self, x_BN: Tensor, cached: Cached, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        """Write the bytes of x - old, and the fresh rows."""

    def decode_change(self, wire_BW: Tensor, cached: Cached, out_BN: Tensor) -> Tensor:
        """Write the fresh rows, and to `out_BN` old + change before rounding to their format."""
