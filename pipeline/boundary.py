"""The Boundary contract: one end of one direction of a cut. `Stateless` is the one without memory.

Axes: B samples, T tokens, D channels, N = T * D values of a sample, W bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.wire.cast import Cast, CastFormat
from pipeline.wire.codec import Codec, Noise


class Memory(Protocol):
    """What a boundary remembers of samples. Its other end's memory takes the same calls.

    `room` is how many samples this end could hold, None if it does not matter.
    """

    room: int | None

    def restrict(self, ids_B: Tensor, samples: int) -> None:
        """Hold only these samples from here on, and at most so many.

        Raises:
            OSError: there is no room for as many.
        """

    def prefetch(self, ids_B: Tensor) -> None:
        """The next step will visit these samples."""

    def fingerprints(self, ids_B: Tensor) -> Tensor:
        """A number (int64, below 2^53) for what is held of each sample: 0 nothing, -1 damaged."""

    def forget(self, ids_B: Tensor) -> None:
        """Hold nothing of these samples."""

    def release(self) -> None:
        """Give back what is held; the memory is not used again."""


class Boundary(Protocol):
    """Turns the activations (or gradients) of one microbatch into a payload, and back.

    It may remember samples: then both ends of the cut hold equal state, and `nbytes` depends only
    on that state. What a step learns is kept apart until `finish_step`, so that a step that was
    skipped or failed leaves nothing behind.
    """

    @property
    def codec_id(self) -> int:
        """Number of the method in message headers."""

    @property
    def bits(self) -> int:
        """Bits per value in message headers."""

    @property
    def memory(self) -> Memory | None:
        """What it remembers of samples, if it does."""

    def nbytes(self, shape_BTD: torch.Size, ids_B: Tensor) -> int:
        """Exact payload bytes; both ends compute the same."""

    def capacity(self, shape_BTD: torch.Size) -> int:
        """The most that `nbytes` can be for this shape, whatever was remembered."""

    def encode(self, x_BTD: Tensor, ids_B: Tensor, wire: Tensor, *, step: int) -> None:
        """Fill `wire` (uint8, `nbytes` long)."""

    def decode(self, wire: Tensor, ids_B: Tensor, out_BTD: Tensor) -> None:
        """Fill `out_BTD` with what the peer sent."""

    def finish_step(self, *, keep: bool) -> None:
        """End the step: keep what it learned, or forget it."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Stateless:
    """One codec for every message: direct quantization, or a cast (`raw`)."""

    codec: Codec
    key: int = 0

    @property
    def codec_id(self) -> int:
        """The codec's number."""
        return self.codec.codec_id

    @property
    def bits(self) -> int:
        """The codec's bits per value."""
        return self.codec.bits

    @property
    def memory(self) -> None:
        """It has none."""

    def nbytes(self, shape_BTD: torch.Size, ids_B: Tensor) -> int:
        """Exact payload bytes."""
        return self.capacity(shape_BTD)

    def capacity(self, shape_BTD: torch.Size) -> int:
        """All messages of a shape are equally long."""
        return shape_BTD[0] * self.codec.nbytes(shape_BTD[1:].numel())

    def encode(self, x_BTD: Tensor, ids_B: Tensor, wire: Tensor, *, step: int) -> None:
        """Fill `wire`; noise is keyed by step and sample."""
        noise = Noise(self.key, step, ids_B)
        rows = x_BTD.shape[0]
        self.codec.encode(x_BTD.detach().reshape(rows, -1), wire.view(rows, -1), noise=noise)

    def decode(self, wire: Tensor, ids_B: Tensor, out_BTD: Tensor) -> None:
        """Fill `out_BTD`."""
        rows = out_BTD.shape[0]
        self.codec.decode(wire.view(rows, -1), out_BTD.view(rows, -1))

    def finish_step(self, *, keep: bool) -> None:
        """Nothing was learned."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: there is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def raw(cast: CastFormat = "fp32") -> Stateless:
    """The boundary that only casts; with fp32 activations and `fp32` it is lossless."""
    return Stateless(Cast(cast))
