"""One message of one direction of a cut: a header, then a boundary's payload."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.pipeline.comm.boundary import Boundary, GradientSink, Memory, MessagePlan
from thinpipe.pipeline.wire.header import HEADER_NBYTES, Header, crc32, payload_length
from thinpipe.pipeline.wire.pinned import host_bytes
from thinpipe.pipeline.wire.told import DIRECTIONS

Mode = Literal["train", "eval", "eval_compressed"]


@dataclass
class MessageCodec:
    """Turns microbatches of one direction of the cut before layer `cut` into messages, and back.

    Both ends hold one each, made and called alike. `boundaries` holds one boundary per mode it can
    run in. Values are coded on `device`, where receivers get tensors of `dtype`. Training's values
    are coded times `scale`, which both ends set alike, so that what is cached does not depend on
    it. `gradient_sink` takes what training decodes, before it is divided by that again.
    """

    cut: int
    direction: int
    boundaries: Mapping[Mode, Boundary]
    run_id: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    gradient_sink: GradientSink | None = None
    _mode: Mode = "train"
    _step: int = 0

    def begin_pass(self, *, step: int, mode: Mode) -> None:
        self._mode, self._step = mode, step

    def capacity(self, shape_BTD: torch.Size) -> int:
        """The longest that a message can be.

        Receives are posted for so much: gloo ends a process that is sent more than it posted, and
        two ends whose caches differ are to get a `DesyncError` instead.
        """
        return HEADER_NBYTES + self._boundary.capacity(shape_BTD)

    def encode(self, microbatch: int, x_BTD: Tensor, ids_B: Tensor) -> Tensor:
        plan = self._boundary.plan(ids_B, x_BTD.shape, step=self._step)
        message = host_bytes(HEADER_NBYTES + plan.capacity, self.device)
        if self._mode == "train" and self.scale != 1.0:
            x_BTD = x_BTD.float() * self.scale
        length = self._boundary.encode(plan, x_BTD, message[HEADER_NBYTES:])
        message = message[: HEADER_NBYTES + length]
        self._header(microbatch, plan, length).write(message)
        return message

    def decode(
        self, microbatch: int, message: Tensor, ids_B: Tensor, shape_BTD: torch.Size
    ) -> Tensor:
        """Check a message and return its values; bytes behind its end are not looked at."""
        plan = self._boundary.plan(ids_B, shape_BTD, step=self._step)
        length = plan.capacity if plan.exact else min(payload_length(message), plan.capacity)
        message = message[: HEADER_NBYTES + length]
        self._header(microbatch, plan, length).check(message)
        out_BTD = torch.empty(shape_BTD, dtype=self.dtype, device=self.device)
        self._boundary.decode(plan, message[HEADER_NBYTES:], out_BTD)
        if self._mode == "train" and self.gradient_sink is not None:
            self.gradient_sink(ids_B, out_BTD)
        if self._mode == "train" and self.scale != 1.0:
            out_BTD.div_(self.scale)
        return out_BTD

    @property
    def name(self) -> str:
        """The same in every run with this cut."""
        return f"cut {self.cut} {DIRECTIONS[self.direction]}"

    @property
    def training(self) -> Boundary:
        return self.boundaries["train"]

    @property
    def memory(self) -> Memory | None:
        return self.training.memory

    @property
    def _boundary(self) -> Boundary:
        return self.boundaries[self._mode]

    def _header(self, microbatch: int, plan: MessagePlan, length: int) -> Header:
        return Header(
            direction=self.direction,
            codec_id=self._boundary.codec_id,
            bits=self._boundary.bits,
            run_id=self.run_id,
            step=self._step,
            cut=self.cut,
            microbatch=microbatch,
            ids_crc=crc32(plan.ids_B),
            length=length,
            memory_crc=plan.checksum,
        )
