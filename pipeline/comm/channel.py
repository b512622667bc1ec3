"""The two ends of a channel, one direction of a cut; each owns the thread that codes its messages.

An outgoing end encodes and sends behind the compute, in the order in which the schedule hands
tensors over. An incoming end takes, checks and decodes ahead of it, in the order in which the
schedule will ask. The schedule's thread waits for decoded values only, and at the end of a pass for
what is still to be encoded; between passes both ends are idle, and what they hold can be read.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.comm.message import MessageCodec, Mode
from thinpipe.pipeline.comm.transport import Link
from thinpipe.pipeline.wire.stream import CudaEvent, SideStream
from thinpipe.pipeline.wire.thread import Worker

_AHEAD = 2
"""Decoded microbatches that may wait for the schedule: one that is ready when it asks, and one more
to even out work of unequal length. Decoded values take many times the memory of messages."""

_SETTLE_S = 20.0  # for jobs whose connections are broken

Record = Callable[[Literal["encode", "decode", "wait"], int, float, float], None]
"""Takes what was done, for which microbatch, and from when to when (`time.perf_counter`)."""


@dataclass(frozen=True)
class Microbatch:
    """What every rank knows of a microbatch before it arrives.

    `shape_BTD` is the message's; hidden states may have fewer tokens, as many as `tokens` says.
    """

    shape_BTD: torch.Size
    samples: Samples
    tokens: int | None = None


@dataclass(frozen=True)
class Pass:
    """One run of the schedule, number `number` of the run, as a part of optimizer step `step`."""

    number: int
    step: int
    mode: Mode
    microbatches: Sequence[Microbatch]
    first_error: FirstError


@dataclass
class Traffic:
    """Counts of one end since they were last taken."""

    nbytes: int = 0
    messages: int = 0
    values: int = 0


class OutgoingChannel:
    """Encodes and sends the microbatches of a pass."""

    def __init__(self, codec: MessageCodec, link: Link) -> None:
        self.codec = codec
        self._link, self._stream = link, SideStream(codec.device)
        self._worker = Worker(f"send {codec.name}")
        self._traffic = Traffic()
        self._last: Future[None] | None = None

    def begin_pass(self, this: Pass, record: Record) -> None:
        self._link.begin_pass(this.number)
        self.codec.begin_pass(step=this.step, mode=this.mode)
        self._pass, self._record, self._last = this, record, None

    def send(self, m: int, x_BTD: Tensor) -> None:
        """Encode and send behind the schedule, which must not change `x_BTD` before `end_pass`.

        Raises what an earlier message raised.
        """
        # the schedule may detach its own in place
        job = partial(self._send, m, x_BTD.detach(), self._stream.now())
        self._pass.first_error.check()
        self._last = self._pass.first_error.watch(self._worker.submit(job))

    def end_pass(self) -> None:
        """Wait until everything is encoded and on its way."""
        if self._last is not None:
            self._pass.first_error.wait_for(self._last)

    def abandon_pass(self) -> None:
        """Wait until nothing is under way, whatever came of it, and be ready for another pass.

        Raises:
            TimeoutError: something still is.
        """
        if self._last is not None:
            self._last.exception(_SETTLE_S)
        self._worker, self._last = Worker(f"send {self.codec.name}"), None

    def take_traffic(self) -> Traffic:
        """Return what was sent, and count from zero."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _send(self, m: int, x_BTD: Tensor, computed: CudaEvent) -> None:
        if computed is not None:
            computed.synchronize()  # so that what is recorded is the codec's time
        with self._stream.after(None):
            start = time.perf_counter()
            message = self.codec.encode(m, x_BTD, self._pass.microbatches[m].samples.ids_B)
            self._link.send(m, message)
            self._record("encode", m, start, time.perf_counter())
        self._traffic.nbytes += message.numel()
        self._traffic.messages += 1
        self._traffic.values += x_BTD.numel()


class IncomingChannel:
    """Takes, checks and decodes the microbatches of a pass."""

    def __init__(self, codec: MessageCodec, link: Link) -> None:
        self.codec = codec
        self._link, self._stream = link, SideStream(codec.device)
        self._worker = Worker(f"receive {codec.name}")
        self._coming: deque[int] = deque()
        self._jobs: dict[int, Future[tuple[Tensor, CudaEvent]]] = {}

    def begin_pass(self, this: Pass, record: Record, order: Sequence[int]) -> None:
        """Post all receives; `order` is that in which `receive` will be called.

        Nothing is waited for before the first `receive`: a link reports a peer that is silent for
        too long, and in the first half of a pass every peer has reason to send no gradients.
        """
        self._link.begin_pass(this.number)
        self.codec.begin_pass(step=this.step, mode=this.mode)
        self._pass, self._record = this, record
        for m in order:
            self._link.expect(m, self.codec.capacity(this.microbatches[m].shape_BTD))
        self._coming, self._jobs = deque(order), {}

    def receive(self, m: int) -> Tensor:
        """Wait for a microbatch.

        Raises:
            TransportError: the peer is gone.
            DesyncError: the message is not the expected one.
            CodingError: its payload does not expand to the expected size.
        """
        first_error = self._pass.first_error
        while self._coming and len(self._jobs) <= _AHEAD:  # the one asked for, and those ahead
            coming = self._coming.popleft()
            job = self._worker.submit(partial(self._take, coming))
            self._jobs[coming] = first_error.watch(job)
        start = time.perf_counter()
        x_BTD, decoded = first_error.wait_for(self._jobs[m])
        del self._jobs[m]  # if another failed meanwhile, `abandon_pass` waits for it
        self._record("wait", m, start, time.perf_counter())
        return self._stream.hand_over(x_BTD, decoded)

    def abandon_pass(self) -> None:
        for job in self._jobs.values():
            job.exception(_SETTLE_S)
        self._worker, self._jobs = Worker(f"receive {self.codec.name}"), {}
        self._coming.clear()

    def _take(self, m: int) -> tuple[Tensor, CudaEvent]:
        known = self._pass.microbatches[m]
        message = self._link.take(m)
        arrived = time.perf_counter()
        with self._stream.after(None):
            x_BTD = self.codec.decode(m, message, known.samples.ids_B, known.shape_BTD)
            decoded = self._stream.now()
        self._record("decode", m, arrived, time.perf_counter())
        return x_BTD, decoded


Channel = OutgoingChannel | IncomingChannel
