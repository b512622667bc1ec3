"""Moves opaque bytes from one rank to another: tags, preposted receives, clear failures.

gloo moves nothing before the receive is posted, matches by (peer, tag) first in first out, swallows
a message whose receive was dropped, and cannot abort; hence every receive of a pass is posted
before any compute, tags are unique within two passes, and every posted receive is taken.
"""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.wire.pinned import host_bytes

MAX_MICROBATCHES = 4096


def transport_reason(error: Exception) -> str:
    """gloo's first sentence, without the place in gloo's source and its advice."""
    return re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


def is_transport_error(error: Exception) -> bool:
    """Whether gloo raised it because of a peer or the network."""
    return "gloo/transport" in str(error) or isinstance(error, TransportError)


class Link(Protocol):
    """One direction between two ranks; a process holds its sending or its receiving end.

    `slot` numbers the messages of a pass (the microbatch); a pass is one run of the schedule.
    `send` and `take` may be called from another thread than the rest, one at a time.
    """

    @property
    def in_turns(self) -> bool:
        """Whether both ends take turns on one thread, so that `take` must not come early."""

    def begin_pass(self, number: int) -> None:
        """Wait for the sends of the pass before and start a new one; all ends count alike."""

    def expect(self, slot: int, nbytes: int) -> None:
        """Post the receive of a message of at most `nbytes`."""

    def take(self, slot: int) -> Tensor:
        """Wait for an expected message (uint8); a shorter one leaves the buffer's end undefined.

        Raises:
            TransportError: the peer is gone, or silent for longer than the group's timeout.
        """

    def send(self, slot: int, message: Tensor) -> None:
        """Send without waiting; the link keeps `message` alive, the caller must not change it."""


@dataclass
class GroupLink:
    """A link over a torch process group with tags (gloo).

    `channel` must differ between links that share a group and a pair of ranks. `name` is how error
    messages call the edge, `device` where messages are decoded.
    """

    group: dist.ProcessGroup
    peer: int
    channel: int
    name: str
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    in_turns: ClassVar[bool] = False
    _pass: int = -1
    _expected: dict[int, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def begin_pass(self, number: int) -> None:
        """Wait for earlier sends; every expected message must have been taken."""
        for work, _ in self._sent:
            self._wait(work, "sending")
        self._sent.clear()
        assert not self._expected, f"{self.name}: messages {list(self._expected)} were never taken"
        self._pass = number

    def expect(self, slot: int, nbytes: int) -> None:
        """Post the receive of a message."""
        buffer = host_bytes(nbytes, self.device)
        work = dist.irecv(buffer, group=self.group, group_src=self.peer, tag=self._tag(slot))
        assert work is not None
        self._expected[slot] = (work, buffer)

    def take(self, slot: int) -> Tensor:
        """Wait for an expected message."""
        work, buffer = self._expected.pop(slot)
        self._wait(work, f"waiting for microbatch {slot}")
        return buffer

    def send(self, slot: int, message: Tensor) -> None:
        """Send without waiting."""
        try:
            work = dist.isend(message, group=self.group, group_dst=self.peer, tag=self._tag(slot))
        except RuntimeError as error:
            raise self._failure(f"sending microbatch {slot}", error) from error
        assert work is not None
        self._sent.append((work, message))

    def _wait(self, work: dist.Work, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: RuntimeError) -> TransportError:
        reason = transport_reason(error)
        return TransportError(f"{self.name}: lost while {doing} (pass {self._pass}): {reason}")

    def _tag(self, slot: int) -> int:
        return ((self._pass & 1) << 18 | self.channel) * MAX_MICROBATCHES + slot


@dataclass
class LoopbackLink:
    """Both ends in one process: for simulations and tests, where stages take turns."""

    in_turns: ClassVar[bool] = True
    _messages: dict[int, Tensor] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)

    def begin_pass(self, number: int) -> None:
        """Nothing is in flight between passes."""

    def expect(self, slot: int, nbytes: int) -> None:
        """Note how long the message may be."""
        self._expected[slot] = nbytes

    def take(self, slot: int) -> Tensor:
        """Return the message, which must be there; a shorter one is zero-filled, as on gloo.

        Raises:
            TransportError: nothing was sent, or more than expected.
        """
        nbytes = self._expected.pop(slot)
        message = self._messages.pop(slot, None)
        if message is None or message.numel() > nbytes:
            found = "nothing" if message is None else f"{message.numel()} bytes"
            raise TransportError(
                f"loopback: expected up to {nbytes} bytes of microbatch {slot}, got {found}"
            )
        return torch.cat([message, message.new_zeros(nbytes - message.numel())])

    def send(self, slot: int, message: Tensor) -> None:
        """Hand the message over."""
        self._messages[slot] = message.clone()
