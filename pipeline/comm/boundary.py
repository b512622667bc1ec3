"""The Boundary contract: one end of one direction of a cut. `Stateless` is the one without a cache.

Axes: B samples, T tokens, D channels, N = T * D values of a sample, W bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.comm.error_stats import ErrorMeter
from thinpipe.pipeline.wire.cast import Cast, CastFormat
from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.pinned import brought_to, written_on

GradientSink = Callable[[Tensor, Tensor], None]
"""Takes sample ids [B] and their gradients [B, T, D] as they were received."""


class Memory(Protocol):
    """A boundary's activation cache. That of its other end takes the same calls.

    `capacity` is how many samples this end could hold, None if it does not matter. One that never
    `caches` samples only learns something else.
    """

    capacity: int | None
    caches: bool

    def restrict(self, ids_B: Tensor, samples: int) -> None:
        """Hold at most so many samples from here on, of these first.

        Raises:
            OSError: there is no room for as many.
        """

    def prefetch(self, ids_B: Tensor) -> None:
        """The next step will visit these samples."""

    def fingerprints(self, ids_B: Tensor) -> Tensor:
        """A number (int64, below 2^53) for what is held of each sample: 0 nothing, -1 damaged."""

    def forget(self, ids_B: Tensor) -> None: ...

    def learned(self) -> int:
        """A number (below 2^53) for what is known besides samples; 0: nothing."""

    def reset(self) -> None:
        """Hold no samples, and know nothing else."""

    def summary(self) -> int:
        """A number (32 bits) for all that is held, equal at both ends; cheap."""

    def release(self) -> None:
        """Give back what is held; the cache is not used again."""


@dataclass(frozen=True)
class MessagePlan:
    """A message as both ends know it before it exists.

    `capacity` is the most payload bytes it can have, `known_B` says which samples are cached, and
    `checksum` stands for what is remembered of them (0 without a memory). A payload that is not
    `exact` may be shorter than its capacity.
    """

    ids_B: Tensor
    shape_BTD: torch.Size
    step: int
    capacity: int
    known_B: Tensor | None = None
    checksum: int = 0
    exact: bool = True


class Boundary(Protocol):
    """Turns the activations (or gradients) of one microbatch into a payload, and back.

    It may cache samples: then both ends of the cut hold equal state, and plans depend only on
    that state. What a step learns is kept apart until `finish_step`, so that a step that was
    skipped or failed leaves nothing behind.
    """

    @property
    def codec_id(self) -> int: ...

    @property
    def bits(self) -> int: ...

    @property
    def memory(self) -> Memory | None:
        """Its activation cache, if it has one."""

    @property
    def error_meter(self) -> ErrorMeter:
        """Measurements of the encoded values."""

    @property
    def take_gradients(self) -> GradientSink | None:
        """Takes the gradients of what it encodes, if it learns from them."""

    def capacity(self, shape_BTD: torch.Size) -> int:
        """The most payload bytes of this shape, whatever is cached."""

    def plan(self, ids_B: Tensor, shape_BTD: torch.Size, *, step: int) -> MessagePlan:
        """Look up the samples of a message, once; both ends find the same."""

    def encode(self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor) -> int:
        """Write the payload to `wire` (uint8 in host memory), return its length.

        `x_BTD` may be on any device; what was queued there is done when it returns.
        """

    def decode(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> None:
        """Fill `out_BTD`, on whichever device, with what the peer sent; may only queue that."""

    def finish_step(self, *, keep: bool) -> None:
        """End the step: keep what it learned, or forget it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LearnsNothing:
    """What a boundary without a cache has of the contract."""

    memory: ClassVar[None] = None
    take_gradients: ClassVar[None] = None

    def finish_step(self, *, keep: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Stateless(LearnsNothing):
    """One codec for every message: direct quantization, or a cast (`raw`)."""

    codec: Codec
    key: int = 0
    error_meter: ErrorMeter = field(default_factory=ErrorMeter, compare=False)

    @property
    def codec_id(self) -> int:
        return self.codec.codec_id

    @property
    def bits(self) -> int:
        return self.codec.bits

    def plan(self, ids_B: Tensor, shape_BTD: torch.Size, *, step: int) -> MessagePlan:
        return MessagePlan(ids_B, shape_BTD, step, self.capacity(shape_BTD))

    def capacity(self, shape_BTD: torch.Size) -> int:
        return shape_BTD[0] * self.codec.capacity(shape_BTD[1:].numel())

    def encode(self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor) -> int:
        noise = Noise(self.key, plan.step, plan.ids_B)
        rows = x_BTD.shape[0]
        x_BN = x_BTD.detach().reshape(rows, -1)
        self.error_meter.count(known=0, first_visits=rows)
        with written_on(x_BN.device, wire) as near:
            wire_BW = near.view(rows, -1)
            self.codec.encode(x_BN, wire_BW, noise=noise)
            if rows and self.error_meter.wants(known=False):
                decoded_1N = torch.empty(1, x_BN.shape[1], device=x_BN.device)
                self.codec.decode(wire_BW[:1], decoded_1N)
                self.error_meter.measure(x_BTD[0], decoded_1N.view(x_BTD.shape[1:]))
        return plan.capacity

    def decode(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> None:
        rows = out_BTD.shape[0]
        near = brought_to(out_BTD.device, wire)
        self.codec.decode(near.view(rows, -1), out_BTD.view(rows, -1))


def raw(cast: CastFormat = "fp32") -> Stateless:
    """The boundary that only casts; with fp32 activations and `fp32` it is lossless."""
    return Stateless(Cast(cast))
