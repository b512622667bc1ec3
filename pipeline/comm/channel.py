"""One end of one direction of a cut: a boundary's payload, under a header, over a link."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from thinpipe.pipeline.comm.boundary import Boundary, Memory
from thinpipe.pipeline.comm.link import Link
from thinpipe.pipeline.wire.entropy import CODING_IDS, Coder, Coding, expand
from thinpipe.pipeline.wire.header import HEADER_NBYTES, Header, coding_and_length, crc32
from thinpipe.pipeline.wire.pinned import host_bytes

FORWARD, BACKWARD = 0, 1

Mode = Literal["train", "eval", "eval_compressed"]


@dataclass
class Traffic:
    """What one end sent since the count was last taken."""

    nbytes: int = 0
    messages: int = 0
    values: int = 0


@dataclass
class Channel:
    """Sends or receives the microbatches of one direction of the cut before layer `cut`.

    `boundaries` holds one boundary per mode it can run in. Values are coded on `device`, where
    receivers get tensors of `dtype`.
    Payloads are entropy-coded by `coding` where that makes them shorter, except in plain
    evaluation; "auto" does so where it is quicker at `link_rate` (bytes per second). From `level` 1
    on, which both ends set between two steps, training goes through one of `fallbacks` instead.
    `arrived_s` is when the last message was there (`time.perf_counter`).
    """

    cut: int
    direction: int
    link: Link
    boundaries: Mapping[Mode, Boundary]
    run_id: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    dtype: torch.dtype = torch.float32
    coding: Coding = "none"
    link_rate: float = math.inf
    fallbacks: Sequence[Boundary] = ()
    level: int = 0
    sent: Traffic = field(default_factory=Traffic)
    arrived_s: float = 0.0
    _mode: Mode = "train"
    _step: int = 0

    def __post_init__(self) -> None:
        self._compress = Coder(self.link_rate if self.coding == "auto" else 0.0)

    def begin_pass(self, number: int, *, step: int, mode: Mode) -> None:
        """Start pass `number` of the run, as a part of optimizer step `step`."""
        self.link.begin_pass(number)
        self._mode, self._step = mode, step

    def expect(self, microbatch: int, shape_BTD: torch.Size) -> None:
        """Post the receive of a microbatch.

        The buffer holds the longest message there can be: gloo ends a process that is sent more
        than it posted, and two ends whose memories differ are to get a `DesyncError` instead.
        """
        self.link.expect(microbatch, HEADER_NBYTES + self._boundary.capacity(shape_BTD))

    def send(self, microbatch: int, x_BTD: Tensor, ids_B: Tensor) -> None:
        """Encode and send; returns before the bytes are gone."""
        length = self._boundary.nbytes(x_BTD.shape, ids_B)
        message = host_bytes(HEADER_NBYTES + length, self.device)
        self._boundary.encode(x_BTD, ids_B, message[HEADER_NBYTES:], step=self._step)
        coding, message = self._shorten(message)
        length = message.numel() - HEADER_NBYTES
        self._header(microbatch, ids_B, length, coding).write(message)
        self.link.send(microbatch, message)
        self.sent.nbytes += message.numel()
        self.sent.messages += 1
        self.sent.values += x_BTD.numel()

    def receive(self, microbatch: int, shape_BTD: torch.Size, ids_B: Tensor) -> Tensor:
        """Wait for a microbatch, check its header, decode it.

        Raises:
            TransportError: the peer is gone.
            DesyncError: the message is not the expected one.
            CodingError: its payload does not expand to the expected size.
        """
        nbytes = self._boundary.nbytes(shape_BTD, ids_B)
        message = self.link.take(microbatch)
        self.arrived_s = time.perf_counter()
        coding, length = self._form(message, nbytes)
        message = message[: HEADER_NBYTES + length]
        self._header(microbatch, ids_B, length, coding).check(message)
        payload = message[HEADER_NBYTES:]
        if coding:
            payload = host_bytes(nbytes, self.device)
            expand(message[HEADER_NBYTES:], payload)
        out_BTD = torch.empty(shape_BTD, dtype=self.dtype, device=self.device)
        self._boundary.decode(payload, ids_B, out_BTD)
        return out_BTD

    def finish_step(self, *, keep: bool) -> None:
        """Tell the training boundary that the step is over."""
        self.boundaries["train"].finish_step(keep=keep)

    def escalate(self, level: int) -> None:
        """Train at this level from the next step on; above 0 nothing is remembered any more."""
        self.level = level
        if level and self.memory is not None:
            self.memory.room = 0
            self.memory.restrict(torch.empty(0, dtype=torch.int64), 0)

    @property
    def memory(self) -> Memory | None:
        """What the training boundary remembers of samples."""
        return self.boundaries["train"].memory

    def take_traffic(self) -> Traffic:
        """Return what was sent and start counting anew."""
        taken, self.sent = self.sent, Traffic()
        return taken

    def take_sums(self) -> list[float]:
        """What the error_meter of training collected since the last call."""
        return self._training.error_meter.take()

    @property
    def _training(self) -> Boundary:
        return self.fallbacks[self.level - 1] if self.level else self.boundaries["train"]

    @property
    def _boundary(self) -> Boundary:
        return self._training if self._mode == "train" else self.boundaries[self._mode]

    def _shorten(self, message: Tensor) -> tuple[int, Tensor]:
        """The id of the coding used, and the message with its payload in that form."""
        if self.coding == "none" or self._mode == "eval":
            return 0, message
        coded = torch.empty_like(message)
        length = self._compress(message[HEADER_NBYTES:], coded[HEADER_NBYTES:])
        if length is None:
            return 0, message
        return CODING_IDS[self.coding], coded[: HEADER_NBYTES + length]

    def _form(self, message: Tensor, nbytes: int) -> tuple[int, int]:
        """Coding and length to expect: the peer's, as far as its choice is free."""
        coding, length = coding_and_length(message)
        if coding == 0 or coding != CODING_IDS[self.coding]:
            return 0, nbytes
        return coding, min(length, nbytes)

    def _header(self, microbatch: int, ids_B: Tensor, length: int, coding: int) -> Header:
        memory = self._boundary.memory
        return Header(
            direction=self.direction,
            codec_id=self._boundary.codec_id,
            bits=self._boundary.bits,
            run_id=self.run_id,
            step=self._step,
            cut=self.cut,
            microbatch=microbatch,
            ids_crc=crc32(ids_B),
            length=length,
            coding=coding,
            memory_crc=0 if memory is None else crc32(memory.fingerprints(ids_B)),
        )
