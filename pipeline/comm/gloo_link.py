"""Links over torch process groups (gloo): tags, preposted receives, clear failures.

gloo moves nothing before the receive is posted, matches by (peer, tag) first in first out, reads no
more from a peer after a message whose receive was dropped, and cannot abort; hence every receive of
a pass is posted before any compute, tags are unique within two passes, and every posted receive is
taken.
"""

import re
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.abandoned import abandonable
from thinpipe.pipeline.comm.errors import SilentError, TransportError
from thinpipe.pipeline.comm.transport import CPU
from thinpipe.pipeline.wire.pinned import host_bytes

MAX_MICROBATCHES = 4096  # 12 bits of a tag: 18 of a channel and one of the pass fill an int32


class Naming:
    """Errors of gloo inside name an edge, with its first sentence, less the place in its source and
    the port, whose bytes are in the wrong order.

    A class, as a generator takes three times as long, twice for each message.

    Raises:
        TransportError: the peer is gone.
        SilentError: it is silent for longer than the group's timeout.
    """

    def __init__(self, edge: str) -> None:
        self._edge = edge

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        reason = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
        reason = re.sub(r" \[[\d.]+\]:\d+", "", reason)
        # a wait that timed out closes its pairs: "Application timeout" for whoever else waits
        late = any(word in reason.lower() for word in ("timed out", "timeout"))
        raise (SilentError if late else TransportError)(f"{self._edge}: {reason}") from error


def isend(x: Tensor, group: dist.ProcessGroup, peer: int, *, edge: str, tag: int = 0) -> dist.Work:
    """Send to a rank of the group; `edge` is how errors call where it goes."""
    with Naming(edge):
        work = dist.isend(x, group=group, group_dst=peer, tag=tag)
    assert work is not None
    return work


def irecv(x: Tensor, group: dist.ProcessGroup, peer: int, *, edge: str, tag: int = 0) -> dist.Work:
    """Post a receive from a rank of the group."""
    with Naming(edge):
        work = dist.irecv(x, group=group, group_src=peer, tag=tag)
    assert work is not None
    return work


def wait(work: dist.Work, *, edge: str) -> None:
    """Wait for a send or a receive."""
    with Naming(edge):
        abandonable(work.wait)


@dataclass
class GlooLink:
    """A link over a group with tags.

    `channel` must differ between links that share a group and a pair of ranks. `name` is how error
    messages call the edge, `device` where messages are decoded.
    """

    group: dist.ProcessGroup
    peer: int
    channel: int
    name: str
    device: torch.device = CPU
    _pass: int = -1
    _expected: dict[int, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def reset(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._expected.clear()
        self._sent.clear()

    def begin_pass(self, number: int) -> None:
        """Wait for earlier sends; every expected message must have been taken."""
        for work, _ in self._sent:
            wait(work, edge=self._edge("sending"))
        self._sent.clear()
        assert not self._expected, f"{self.name}: messages {list(self._expected)} were never taken"
        self._pass = number

    def expect(self, slot: int, nbytes: int) -> None:
        buffer = host_bytes(nbytes, self.device)
        edge = self._edge(f"waiting for microbatch {slot}")
        work = irecv(buffer, self.group, self.peer, edge=edge, tag=self._tag(slot))
        self._expected[slot] = (work, buffer)

    def take(self, slot: int) -> Tensor:
        work, buffer = self._expected.pop(slot)
        wait(work, edge=self._edge(f"waiting for microbatch {slot}"))
        return buffer

    def send(self, slot: int, message: Tensor) -> None:
        edge = self._edge(f"sending microbatch {slot}")
        work = isend(message, self.group, self.peer, edge=edge, tag=self._tag(slot))
        self._sent.append((work, message))

    def _edge(self, doing: str) -> str:
        return f"{self.name}: lost while {doing} (pass {self._pass})"

    def _tag(self, slot: int) -> int:
        return ((self._pass & 1) << 18 | self.channel) * MAX_MICROBATCHES + slot
