"""Couriers take a channel's codec and link off the schedule's thread, each on a thread of its own.

A sender encodes and sends behind the compute, in the order in which the schedule hands tensors
over. A receiver takes, checks and decodes ahead of it, in the order in which the schedule will ask.
The schedule's thread waits for decoded values only, and at the end of a pass for what is still to
be encoded; between passes couriers are idle, and whatever a channel holds can be read.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.channel import Channel
from thinpipe.pipeline.wire.stream import CudaEvent, SideStream
from thinpipe.pipeline.wire.thread import Worker

_AHEAD = 2
"""Decoded microbatches that may wait for the schedule: one that is ready when it asks, and one more
to even out work of unequal length. Decoded values take many times the memory of messages."""

Record = Callable[[Literal["encode", "decode", "wait"], int, float, float], None]
"""Takes what was done, for which microbatch, and from when to when (`time.perf_counter`)."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Microbatch:
    """What every rank knows of a microbatch before it arrives."""

    shape_BTD: torch.Size
    samples: Samples


class FirstError:
    """Tells the schedule's thread of the first failure of any courier of its rank.

    Waiting for one courier alone could take forever: what it waits for may depend on a message that
    another one failed to send.
    """

    def __init__(self) -> None:
        self._failure: Future[None] = Future()

    def watch(self, job: "Future[_T]") -> "Future[_T]":
        """Raise the first_error if `job` fails; returns it."""
        job.add_done_callback(self._hear)
        return job

    def check(self) -> None:
        """Raise what a courier raised, if one did."""
        if self._failure.done():
            self._failure.result()

    def wait_for(self, job: "Future[_T]") -> _T:
        """The result of `job`, or the failure of whichever courier failed first."""
        either: tuple[Future[Any], ...] = (job, self._failure)
        if not job.done():
            wait(either, return_when=FIRST_COMPLETED)
        if not job.done():
            self.check()
        return job.result()

    def _hear(self, job: "Future[Any]") -> None:
        error = job.exception()
        if error is not None:
            with contextlib.suppress(InvalidStateError):  # it is not the first
                self._failure.set_exception(error)


class Sender:
    """Encodes and sends the microbatches of a pass."""

    def __init__(self, channel: Channel, record: Record) -> None:
        self._channel, self._record, self._side_stream = channel, record, SideStream(channel.device)
        self._worker = _worker(channel, "send")
        self._first_error = FirstError()
        self._microbatches: Sequence[Microbatch] = ()
        self._last: Future[None] | None = None

    def begin_pass(self, microbatches: Sequence[Microbatch], first_error: FirstError) -> None:
        """Be ready to send some of these; the channel's `begin_pass` was called before."""
        self._microbatches, self._first_error, self._last = microbatches, first_error, None

    def send(self, m: int, x_BTD: Tensor) -> None:
        """Encode and send behind the schedule, which must not change `x_BTD` before `end_pass`.

        Raises what an earlier message raised.
        """
        # the schedule may detach its own in place
        job = partial(self._send, m, x_BTD.detach(), self._side_stream.now())
        if self._worker is None:
            job()
            return
        self._first_error.check()
        self._last = self._first_error.watch(self._worker.submit(job))

    def end_pass(self) -> None:
        """Wait until everything is encoded and on its way."""
        if self._last is not None:
            self._first_error.wait_for(self._last)

    def _send(self, m: int, x_BTD: Tensor, computed: CudaEvent) -> None:
        if computed is not None:
            computed.synchronize()  # so that what is recorded is the codec's time
        with self._side_stream.after(None):
            start = time.perf_counter()
            self._channel.send(m, x_BTD, self._microbatches[m].samples.ids_B)
            self._record("encode", m, start, time.perf_counter())


class Receiver:
    """Takes, checks and decodes the microbatches of a pass."""

    def __init__(self, channel: Channel, record: Record) -> None:
        self._channel, self._record, self._side_stream = channel, record, SideStream(channel.device)
        self._worker = _worker(channel, "receive")
        self._first_error = FirstError()
        self._microbatches: Sequence[Microbatch] = ()
        self._coming: deque[int] = deque()
        self._jobs: dict[int, Future[tuple[Tensor, CudaEvent]]] = {}

    def begin_pass(
        self, microbatches: Sequence[Microbatch], first_error: FirstError, order: Sequence[int]
    ) -> None:
        """Post all receives; `order` is that in which `receive` will be called.

        The channel's `begin_pass` was called before. Nothing is waited for before the first
        `receive`: the link gives up a peer that is silent for too long, and in the first half of a
        pass every peer has reason to send no gradients.
        """
        self._microbatches, self._first_error = microbatches, first_error
        for m, microbatch in enumerate(microbatches):
            self._channel.expect(m, microbatch.shape_BTD)
        self._coming, self._jobs = deque(order), {}

    def receive(self, m: int) -> Tensor:
        """Wait for a microbatch.

        Raises:
            TransportError, DesyncError, CodingError: as `Channel.receive`, from any courier of the
            rank.
        """
        if self._worker is None:
            return self._side_stream.hand_over(*self._take(m))
        while self._coming and len(self._jobs) <= _AHEAD:
            self._decode_next(self._worker)
        start = time.perf_counter()
        x_BTD, there = self._first_error.wait_for(self._jobs.pop(m))
        self._record("wait", m, start, time.perf_counter())
        return self._side_stream.hand_over(x_BTD, there)

    def _decode_next(self, worker: Worker) -> None:
        m = self._coming.popleft()
        self._jobs[m] = self._first_error.watch(worker.submit(partial(self._take, m)))

    def _take(self, m: int) -> tuple[Tensor, CudaEvent]:
        start = time.perf_counter()
        known = self._microbatches[m]
        with self._side_stream.after(None):
            x_BTD = self._channel.receive(m, known.shape_BTD, known.samples.ids_B)
            there = self._side_stream.now()
        arrived = self._channel.arrived_s
        if self._worker is None:
            self._record("wait", m, start, arrived)
        self._record("decode", m, arrived, time.perf_counter())
        return x_BTD, there


def _worker(channel: Channel, what: str) -> Worker | None:
    """None where both ends take turns on one thread: nothing arrives while one of them waits."""
    if channel.link.in_turns:
        return None
    return Worker(f"{what} cut {channel.cut} {('forward', 'backward')[channel.direction]}")
