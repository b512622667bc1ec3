"""The two exchanges that methods are made of, over framed messages between replicas.

* `reduce_sharded`: every replica is the server of one shard. All send it their part of that shard
  (all-to-all); it sums, compresses again and sends the answer to all (all-gather). A replica sends
  2 (R - 1) / R compressed copies, as a ring all-reduce does, in 2 hops instead of 2 (R - 1).
* `gather_sum`: every replica sends what it has to all, and all sum. R - 1 copies in one hop, one
  compression instead of two: for messages that are small to begin with.

Sums are made in the order of the replicas, so results are equal on all of them bit for bit. Where
one raises a `TransportError` or `DesyncError`, it changed nothing.

Axes: N values, n values of a shard, R replicas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.pipeline.comm.transport import LANES, Peers
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.exchange_header import (
    EXCHANGE_HEADER_NBYTES,
    FROM_SERVER,
    TO_SERVER,
    ExchangeHeader,
)
from thinpipe.pipeline.wire.pinned import brought_to, host_bytes, written_on

EXACT = Cast("fp32")


@dataclass(frozen=True)
class ExchangeKey:
    """Which exchange a message belongs to; headers carry it, so that mix-ups are noticed.

    `digest` stands for whatever else the replicas must have in common.
    """

    step: int
    bucket: int
    digest: int = 0

    @property
    def lane(self) -> int:
        return self.bucket % LANES


@dataclass(frozen=True)
class Reduced:
    """Result of `reduce_sharded` on a replica.

    `seen` is what the servers received of this replica's `targets`; `results` is the answer, equal
    on all replicas; `left_n` is what this server's answer lacks of what it was to be.
    """

    seen: list[Tensor]
    results: list[Tensor]
    left_n: Tensor


def reduce_sharded(
    peers: Peers,
    key: ExchangeKey,
    targets: Sequence[Tensor],
    *,
    codec: Codec,
    finish: Callable[[Tensor], Tensor],
) -> Reduced:
    """Sum what the replicas have, shard by shard, compressed on both ways.

    `targets` holds one vector (fp32) per server. `finish` turns the sum of this server's shard,
    which it may overwrite, into what the answer is to be.
    """
    seen, results = ([torch.empty_like(target) for target in targets] for _ in range(2))
    answer_n = _exchange(peers, key, targets, seen, results, codec=codec, finish=finish)
    return Reduced(seen, results, answer_n - results[peers.rank])


def sum_sharded(peers: Peers, key: ExchangeKey, x_N: Tensor, *, codec: Codec) -> Tensor:
    """Sum the replicas' vectors (fp32) as `reduce_sharded` does."""
    sum_N, me = torch.empty_like(x_N), peers.rank
    targets, results = x_N.tensor_split(peers.size), sum_N.tensor_split(peers.size)
    # only of its own shard: no residual is kept here
    seen = [torch.empty_like(x) if peer == me else None for peer, x in enumerate(targets)]
    _exchange(peers, key, targets, seen, results, codec=codec, finish=lambda total_n: total_n)
    return sum_N


def _exchange(
    peers: Peers,
    key: ExchangeKey,
    targets: Sequence[Tensor],
    seen: Sequence[Tensor | None],
    results: Sequence[Tensor],
    *,
    codec: Codec,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """Fill what is `seen` and the `results` of `reduce_sharded`; this server's answer.

    `seen` may lack any shard but this server's.
    """
    frames, me, others = Frames(key, codec), peers.rank, _others(peers)
    longest = max(codec.capacity(target.numel()) for target in targets)
    for _ in ("to servers", "answers"):
        peers.expect(others, longest, key.lane)
    pairs = enumerate(zip(targets, seen, strict=True))
    outgoing = {peer: frames.pack(x, s, TO_SERVER, me) for peer, (x, s) in pairs}
    del outgoing[me]  # only what is seen of it was wanted
    incoming = peers.exchange(outgoing, others, longest, key.lane)
    mine_n = seen[me]
    assert mine_n is not None, "of this server's shard it never lacks"
    answer_n = finish(frames.total(incoming, mine_n, TO_SERVER, me))
    message = frames.pack(answer_n, results[me], FROM_SERVER, me)
    for peer, answer in _to_all(peers, key, message, longest).items():
        frames.unpack(answer, results[peer], FROM_SERVER, peer)
    return answer_n


def gather_sum(
    peers: Peers, key: ExchangeKey, target_N: Tensor, *, codec: Codec
) -> tuple[Tensor, Tensor]:
    """Sum the replicas' vectors (fp32), each compressed once; (sum, what was sent of ours)."""
    frames = Frames(key, codec)
    seen_N = torch.empty_like(target_N)
    message = frames.pack(target_N, seen_N, TO_SERVER, peers.rank)
    incoming = _to_all(peers, key, message, codec.capacity(target_N.numel()))
    return frames.total(incoming, seen_N, TO_SERVER, peers.rank), seen_N


def gather_bytes(
    peers: Peers, key: ExchangeKey, mine_N: Tensor, seen_N: Tensor | None = None, *, codec: Codec
) -> list[Tensor]:
    """Every replica's payload, by rank; fills `seen_N` with what the others see of this one's."""
    frames, me = Frames(key, codec), peers.rank
    message = frames.pack(mine_N, seen_N, TO_SERVER, me)
    incoming = {me: message, **_to_all(peers, key, message, codec.capacity(mine_N.numel()))}
    return [frames.payload(incoming[rank], TO_SERVER, rank) for rank in range(peers.size)]


def swap(
    peers: Peers,
    key: ExchangeKey,
    mine_N: Tensor,
    others: Sequence[int],
    *,
    codec: Codec,
    seen_N: Tensor | None = None,
) -> dict[int, Tensor]:
    """The vectors (fp32) of some replicas, to which this one's goes; `seen_N` is what they see."""
    frames = Frames(key, codec)
    message = frames.pack(mine_N, seen_N, TO_SERVER, peers.rank)
    longest = codec.capacity(mine_N.numel())
    incoming = peers.exchange(dict.fromkeys(others, message), others, longest, key.lane)
    found = {peer: torch.empty_like(mine_N) for peer in incoming}
    for peer, theirs in incoming.items():
        frames.unpack(theirs, found[peer], TO_SERVER, peer)
    return found


def _to_all(peers: Peers, key: ExchangeKey, message: Tensor, capacity: int) -> dict[int, Tensor]:
    others = _others(peers)
    return peers.exchange(dict.fromkeys(others, message), others, capacity, key.lane)


def _others(peers: Peers) -> list[int]:
    return [peer for peer in range(peers.size) if peer != peers.rank]


@dataclass(frozen=True)
class Frames:
    """Messages of one exchange: headers, which are checked, and payloads of one codec."""

    key: ExchangeKey
    codec: Codec

    def pack(self, x_n: Tensor, seen_n: Tensor | None, phase: int, sender: int) -> Tensor:
        longest = EXCHANGE_HEADER_NBYTES + self.codec.capacity(x_n.numel())
        message = host_bytes(longest, x_n.device)
        length = 0
        if x_n.numel():
            with written_on(x_n.device, message[EXCHANGE_HEADER_NBYTES:]) as near:
                length = self.codec.encode(
                    x_n[None], near[None], None if seen_n is None else seen_n[None], noise=None
                )
        message = message[: EXCHANGE_HEADER_NBYTES + length]
        self._header(phase, sender).write(message)
        return message

    def wrap(self, payload: Tensor, phase: int, sender: int) -> Tensor:
        message = torch.empty(EXCHANGE_HEADER_NBYTES + payload.numel(), dtype=torch.uint8)
        message[EXCHANGE_HEADER_NBYTES:] = payload
        self._header(phase, sender).write(message)
        return message

    def unpack(self, message: Tensor, out_n: Tensor, phase: int, sender: int) -> None:
        payload = self.payload(message, phase, sender)
        if out_n.numel():
            self.codec.decode(brought_to(out_n.device, payload)[None], out_n[None])

    def payload(self, message: Tensor, phase: int, sender: int) -> Tensor:
        self._header(phase, sender).check(message)
        return message[EXCHANGE_HEADER_NBYTES:]

    def total(self, incoming: dict[int, Tensor], mine_n: Tensor, phase: int, me: int) -> Tensor:
        """Sum over the replicas, in their order."""
        total_n = torch.zeros_like(mine_n)
        for sender in sorted([*incoming, me]):
            if sender == me:
                total_n += mine_n
                continue
            payload = self.payload(incoming[sender], phase, sender)
            if total_n.numel():
                self._add(payload, total_n)
        return total_n

    def _add(self, payload: Tensor, total_n: Tensor) -> None:
        if (decode_add := getattr(self.codec, "decode_add", None)) is not None:
            decode_add(payload, total_n)  # visits the kept values only
            return
        value_n = torch.empty_like(total_n)
        self.codec.decode(brought_to(total_n.device, payload)[None], value_n[None])
        total_n += value_n

    def _header(self, phase: int, sender: int) -> ExchangeHeader:
        return ExchangeHeader(
            phase=phase,
            codec_id=self.codec.codec_id,
            bits=self.codec.bits,
            step=self.key.step,
            bucket=self.key.bucket,
            sender=sender,
            digest=self.key.digest,
        )
