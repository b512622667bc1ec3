"""The Transport contract: everything that leaves a rank. `gloo.py` is the one for networks."""

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.wire.checksum import CHECKSUM_NBYTES

Scope = Literal["pipeline", "replica", "shards", "stage", "copies", "world"]
"""Ranks of this rank's pipeline; of its replica, which without shards are the same; the shards of
its stages; all at its position; those of them that hold the same weights; or all."""

CLOCK, TIED, WEIGHTS, FIRST_CUT = 4, 6, 8, 10
"""Channels of links, two each, one per direction. Those below `FIRST_CUT` reach all ranks, those of
cuts the ranks of this pipeline."""
CPU = torch.device("cpu")
LANES = 4
"""A sum over replicas waits three times for the link's delay: so many buckets wait at the same
time. Each takes the memory of some five buckets meanwhile."""


class Link(Protocol):
    """One direction between two ranks; a process holds its sending or its receiving end.

    `slot` numbers the messages of a pass (the microbatch); a pass is one run of the schedule.
    `send` and `take` may be called from another thread than the rest, one at a time.
    """

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


class Peers(Protocol):
    """This rank's end of the exchanges between `size` ranks, numbered from 0.

    Exchanges of unlike lanes, below `LANES`, may be under way at once, each in a thread; those of
    a lane follow each other, in the same order on all ranks.
    """

    rank: int
    size: int
    bytes_sent: int
    """Bytes handed to the network so far, headers included, but not what a transport adds."""

    def expect(self, sources: Collection[int], capacity: int, lane: int = 0) -> None:
        """Post the receives of the lane's next `exchange` that has none, with the same arguments.

        Data leave a peer once it knows of them: an exchange that is expected takes a delay less.
        """

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        """Send each message (uint8, by target), return one message of every source.

        A message starts with the header of `pipeline/wire/exchange_header.py`; payloads are at
        most `capacity` bytes long, of which all ranks give the same number. If a rank names a
        source, that source must name it a target.

        Raises:
            TransportError: a peer is gone, or silent for longer than the timeout.
            DesyncError: a message is longer than it can be, or its sender has another `capacity`.
        """


class Transport(Protocol):
    """Moves bytes between ranks. Made once, by `launch/net/ranks/session.py`.

    No other module calls torch's point-to-point or control functions. Every failure is a
    `TransportError` that names the edge. All ranks concerned make the same calls in the same order.
    """

    mesh: Mesh
    pipeline_group: dist.ProcessGroup
    """The ranks of this rank's pipeline, as torch's stages want to know them; nothing is sent."""
    shard_group: dist.ProcessGroup
    """The ranks that hold this rank's stages together, as FSDP2 wants to know them."""

    def link(self, peer: int, channel: int, name: str, *, device: torch.device = CPU) -> Link:
        """One direction to or from a rank; `channel` tells links between the same two ranks apart.

        `name` is how error messages call the edge, `device` where messages are decoded.
        """

    def peers(self, scope: Scope, what: str = "replica") -> Peers:
        """Exchanges between these ranks, in their order; `what` errors call each."""

    def share(self, values: Tensor, scope: Scope) -> Tensor:
        """The vectors (float64) of all ranks in the scope: [ranks, values].

        They are in the order of DP ranks, and in each of positions.

        Takes one hop, and proves by a checksum that each came as it was sent, and by a digest that
        all ranks got the same ones the last time.

        Raises:
            DesyncError: they did not.
        """

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on all ranks. Checksummed."""

    def close(self) -> None:
        """Wait until no rank needs its links any more, and free them."""


def shared_nbytes(all_RN: Tensor) -> int:
    """Bytes that all ranks together sent for what `share` returned."""
    ranks, values = all_RN.shape
    return ranks * (ranks - 1) * (8 * (values + 1) + CHECKSUM_NBYTES)  # and a digest
