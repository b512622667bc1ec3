"""One end of one direction of a cut: a boundary's payload, under a header, over a link."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pipeline.boundary import Boundary
from pipeline.link import Link
from pipeline.wire.header import HEADER_NBYTES, Header, crc32

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

    `boundaries` holds one boundary per mode it can run in; receivers get tensors of `dtype`.
    """

    cut: int
    direction: int
    link: Link
    boundaries: Mapping[Mode, Boundary]
    run_id: int
    dtype: torch.dtype = torch.float32
    sent: Traffic = field(default_factory=Traffic)
    _mode: Mode = "train"
    _step: int = 0

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
        message = torch.empty(HEADER_NBYTES + length, dtype=torch.uint8)
        self._boundary.encode(x_BTD, ids_B, message[HEADER_NBYTES:], step=self._step)
        self._header(microbatch, ids_B, length).write(message)
        self.link.send(microbatch, message)
        self.sent.nbytes += message.numel()
        self.sent.messages += 1
        self.sent.values += x_BTD.numel()

    def receive(self, microbatch: int, shape_BTD: torch.Size, ids_B: Tensor) -> Tensor:
        """Wait for a microbatch, check its header, decode it.

        Raises:
            LinkError: the peer is gone.
            DesyncError: the message is not the expected one.
        """
        length = self._boundary.nbytes(shape_BTD, ids_B)
        message = self.link.take(microbatch)[: HEADER_NBYTES + length]
        self._header(microbatch, ids_B, length).check(message)
        out_BTD = torch.empty(shape_BTD, dtype=self.dtype)
        self._boundary.decode(message[HEADER_NBYTES:], ids_B, out_BTD)
        return out_BTD

    def finish_step(self, *, keep: bool) -> None:
        """Tell the training boundary that the step is over."""
        self.boundaries["train"].finish_step(keep=keep)

    def take_traffic(self) -> Traffic:
        """Return what was sent and start counting anew."""
        taken, self.sent = self.sent, Traffic()
        return taken

    @property
    def _boundary(self) -> Boundary:
        return self.boundaries[self._mode]

    def _header(self, microbatch: int, ids_B: Tensor, length: int) -> Header:
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
        )
