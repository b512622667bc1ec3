"""Gathers and scatters that send every value between sites once, and not once per rank.

ZeRO++ (Wang et al., 2023) quantizes between nodes and uses the fast links inside them. `ranks`
neighbours are a site, and ranks with the same place in their sites are each other's counterparts:

    gather   every rank sends its message to its counterparts, and forwards what it got, as it is,
             inside its site: all decode the same bytes, so the result is that of one hop
    scatter  ranks of a site first add up, in fp32, what they have for one of them and its
             counterparts; each sends these sums on, quantized once

Of N ranks, a site of K sends N - K messages to others instead of K (N - K). With K = 1 there is one
hop, between all.

Axes: N values that one rank keeps, S sites.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, Frames
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.exchange_header import (
    EXCHANGE_HEADER_NBYTES,
    FROM_SERVER,
    TO_SERVER,
    payload_nbytes,
)
from thinpipe.pipeline.wire.header import DesyncError


@dataclass(frozen=True)
class Exchange:
    """What is to be done for one, in this order; each gets what the one before returned.

    Only `exchange` waits for other ranks, so that meanwhile others may be encoded and decoded.
    """

    encode: Callable[[], Any]
    exchange: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Sites:
    """This rank's end of the exchanges between the shards of a stage.

    `bytes_sent` is what it has sent to other sites so far, headers included.
    """

    def __init__(self, peers: Peers, ranks: int) -> None:
        """`ranks` divides the number of peers."""
        self.rank, self.size, self._peers, self._ranks = peers.rank, peers.size, peers, ranks
        self.bytes_sent = 0
        first = peers.rank - peers.rank % ranks
        self._site = range(first, first + ranks)
        self._counterparts = range(peers.rank % ranks, peers.size, ranks)

    def gather(self, key: ExchangeKey, codec: Codec, parts: Sequence[Tensor]) -> Exchange:
        """Fill the ranks' `parts` (fp32) with what all see of them; one's own is in its place.

        If it raises TransportError or DesyncError, `parts` may be filled in part; nothing else was
        changed.
        """
        frames, me, capacity = Frames(key, codec), self.rank, codec.capacity(len(parts[self.rank]))

        def encode() -> Tensor:
            return frames.pack(parts[me], parts[me], TO_SERVER, me)

        def exchange(message: Tensor) -> dict[int, Tensor]:
            others = [rank for rank in self._counterparts if rank != me]
            found = self._across(dict.fromkeys(others, message), capacity)
            if self._ranks == 1:
                return found
            column = [found.get(rank, message) for rank in self._counterparts]
            return self._forwarded(frames, column, capacity)

        def decode(found: dict[int, Tensor]) -> None:
            for rank, theirs in found.items():
                frames.unpack(theirs, parts[rank], TO_SERVER, rank)

        return Exchange(encode, exchange, decode)

    def scatter(self, key: ExchangeKey, codec: Codec, parts: Sequence[Tensor]) -> Exchange:
        """Sum the vectors (fp32) that all have for this rank; `parts` has this one's for each.

        What stays in a site is not compressed. If it raises TransportError or DesyncError, nothing
        was changed.
        """
        frames, me, capacity = Frames(key, codec), self.rank, codec.capacity(len(parts[self.rank]))

        def packed(sums: Sequence[Tensor]) -> tuple[dict[int, Tensor], Tensor]:
            """Messages to counterparts, and what stays here."""
            of = dict(zip(self._counterparts, sums, strict=True))
            mine = of.pop(me)
            return {rank: frames.pack(x, None, FROM_SERVER, me) for rank, x in of.items()}, mine

        def encode() -> tuple[dict[int, Tensor], Tensor] | None:
            return packed(parts) if self._ranks == 1 else None

        def exchange(
            encoded: tuple[dict[int, Tensor], Tensor] | None,
        ) -> tuple[dict[int, Tensor], Tensor]:
            outgoing, mine = encoded or packed(self._site_sums(key, parts))
            return self._across(outgoing, capacity), mine

        def decode(found: tuple[dict[int, Tensor], Tensor]) -> Tensor:
            return frames.total(*found, FROM_SERVER, me)

        return Exchange(encode, exchange, decode)

    def _across(self, outgoing: dict[int, Tensor], capacity: int) -> dict[int, Tensor]:
        self.bytes_sent += sum(message.numel() for message in outgoing.values())
        return self._peers.exchange(outgoing, list(outgoing), capacity)

    def _forwarded(
        self, frames: Frames, column: Sequence[Tensor], capacity: int
    ) -> dict[int, Tensor]:
        """Messages of all other ranks, from those of this rank's counterparts, its own included."""
        me, longest = self.rank, len(column) * (EXCHANGE_HEADER_NBYTES + capacity)
        bundle = frames.wrap(torch.cat(list(column)), FROM_SERVER, me)
        others = [rank for rank in self._site if rank != me]
        bundles = self._peers.exchange(dict.fromkeys(others, bundle), others, longest)
        found: dict[int, Tensor] = {}
        for peer in self._site:
            held = bundle if peer == me else bundles[peer]
            senders = range(peer % self._ranks, self.size, self._ranks)
            messages = divided(frames.payload(held, FROM_SERVER, peer), len(senders), peer)
            found.update(zip(senders, messages, strict=True))
        del found[me]
        return found

    def _site_sums(self, key: ExchangeKey, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """This site's sums for this rank and its counterparts, by site."""
        frames, me = Frames(key, EXACT), self.rank
        columns = {
            peer: torch.cat(list(parts[peer % self._ranks :: self._ranks])) for peer in self._site
        }
        outgoing = {
            peer: frames.pack(column, None, TO_SERVER, me)
            for peer, column in columns.items()
            if peer != me
        }
        capacity = EXACT.capacity(columns[me].numel())
        incoming = self._peers.exchange(outgoing, list(outgoing), capacity)
        total = frames.total(incoming, columns[me], TO_SERVER, me)
        return total.chunk(len(self._counterparts))


def divided(payload: Tensor, count: int, peer: int) -> list[Tensor]:
    """The messages that a rank of this site has forwarded as one.

    Raises:
        DesyncError: they are not `count` whole ones.
    """
    found: list[Tensor] = []
    while payload.numel() >= EXCHANGE_HEADER_NBYTES and len(found) < count:
        length = EXCHANGE_HEADER_NBYTES + payload_nbytes(payload)
        found.append(payload[:length])
        payload = payload[length:]
    if len(found) < count or payload.numel():
        raise DesyncError(
            f"rank {peer} of this site forwarded {len(found)} messages and {payload.numel()} bytes "
            f"more, not {count} messages"
        )
    return found
