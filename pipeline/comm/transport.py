"""The Transport contract: everything that leaves a rank. `gloo.py` is the one for networks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from thinpipe.pipeline.comm.link import Link

Scope = Literal["replica", "world"]
"""Ranks that share a vector: those of this rank's pipeline, or all."""


class Peers(Protocol):
    """This rank's end of the exchanges between `size` ranks, numbered from 0. Not thread-safe."""

    rank: int
    size: int
    bytes_sent: int
    """Bytes handed to the network so far, headers included."""

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int
    ) -> dict[int, Tensor]:
        """Send each message (uint8, by target), return one message of every source.

        A message starts with the header of `pipeline/wire/exchange_header.py`; payloads are at
        most `capacity` bytes long. If a rank names a source, that source must name it a target.

        Raises:
            TransportError: a peer is gone, or silent for longer than the timeout.
            DesyncError: a message is longer than it can be.
        """


class Transport(Protocol):
    """Moves bytes between ranks. Made once, by `launch/distributed/session.py`.

    No other module calls torch's point-to-point or control functions. Every failure is a
    `TransportError` that names the edge. `link` and `peers` are called alike by all ranks.
    """

    rank: int
    world_size: int

    def link(self, peer: int, channel: int, name: str) -> Link:
        """One direction to or from a rank; `channel` tells links between the same two apart."""

    def peers(self, ranks: Sequence[int]) -> Peers:
        """Exchanges between these ranks, of which this is one."""

    def share(self, values: Tensor, scope: Scope) -> Tensor:
        """Every rank's vector (float64), in one hop: [ranks, values]. Checksummed."""

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on all ranks. Checksummed."""

    def close(self) -> None:
        """Wait until no rank needs its links any more, and free them."""
