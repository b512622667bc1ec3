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

from collections.abc import Sequence

import torch
from torch import Tensor

from thinpipe.gradcomp.exchange import ExchangeKey, Frames
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.exchange_header import (
    EXCHANGE_HEADER_NBYTES,
    FROM_SERVER,
    TO_SERVER,
    payload_nbytes,
)
from thinpipe.pipeline.wire.header import DesyncError

_EXACT = Cast("fp32")


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

    def gather(self, key: ExchangeKey, codec: Codec, parts: Sequence[Tensor]) -> None:
        """Fill the ranks' `parts` (fp32) with what all see of them; one's own is in its place.

        Raises:
            TransportError, DesyncError: `parts` may be filled in part; nothing else was changed.
        """
        frames, me = Frames(key, codec), self.rank
        message = frames.pack(parts[me], parts[me], TO_SERVER, me)
        others = [rank for rank in self._counterparts if rank != me]
        found = self._across(dict.fromkeys(others, message), codec.capacity(parts[me].numel()))
        if self._ranks > 1:
            column = [found.get(rank, message) for rank in self._counterparts]
            found = self._forwarded(frames, column, codec.capacity(parts[me].numel()))
        for rank, theirs in found.items():
            frames.unpack(theirs, parts[rank], TO_SERVER, rank)

    def scatter(self, key: ExchangeKey, codec: Codec, parts: Sequence[Tensor]) -> Tensor:
        """Sum of the vectors (fp32) that all have for this rank; `parts` has this one's for each.

        What stays in a site is not compressed.

        Raises:
            TransportError, DesyncError: nothing was changed.
        """
        frames, me = Frames(key, codec), self.rank
        sums = parts if self._ranks == 1 else self._site_sums(key, parts)
        sums_of = dict(zip(self._counterparts, sums, strict=True))
        outgoing = {
            rank: frames.pack(sum_N, None, FROM_SERVER, me)
            for rank, sum_N in sums_of.items()
            if rank != me
        }
        incoming = self._across(outgoing, codec.capacity(parts[me].numel()))
        return frames.total(incoming, sums_of[me], FROM_SERVER, me)

    def _across(self, outgoing: dict[int, Tensor], capacity: int) -> dict[int, Tensor]:
        self.bytes_sent += sum(message.numel() for message in outgoing.values())
        return self._peers.exchange(outgoing, list(outgoing), capacity)

    def _forwarded(
        self, frames: Frames, column: Sequence[Tensor], capacity: int
    ) -> dict[int, Tensor]:
        """Messages of all other ranks, from those of this rank's counterparts, its own included."""
        me, longest = self.rank, len(column) * (EXCHANGE_HEADER_NBYTES + capacity)
        bundle = frames.wrap(torch.cat(list(column)), FROM_SERVER, me)
        mates = [rank for rank in self._site if rank != me]
        bundles = self._peers.exchange(dict.fromkeys(mates, bundle), mates, longest)
        found: dict[int, Tensor] = {}
        for mate in self._site:
            held = bundle if mate == me else bundles[mate]
            senders = range(mate % self._ranks, self.size, self._ranks)
            messages = divided(frames.payload(held, FROM_SERVER, mate), len(senders), mate)
            found.update(zip(senders, messages, strict=True))
        del found[me]
        return found

    def _site_sums(self, key: ExchangeKey, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this site has for this rank and its counterparts, by site."""
        frames, me = Frames(key, _EXACT), self.rank
        columns = {
            mate: torch.cat(list(parts[mate % self._ranks :: self._ranks])) for mate in self._site
        }
        outgoing = {
            mate: frames.pack(column, None, TO_SERVER, me)
            for mate, column in columns.items()
            if mate != me
        }
        capacity = _EXACT.capacity(columns[me].numel())
        incoming = self._peers.exchange(outgoing, list(outgoing), capacity)
        total = frames.total(incoming, columns[me], TO_SERVER, me)
        return total.chunk(len(self._counterparts))


def divided(payload: Tensor, count: int, mate: int) -> list[Tensor]:
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
            f"rank {mate} of this site forwarded {len(found)} messages and {payload.numel()} bytes "
            f"more, not {count} messages"
        )
    return found
