"""The vector that all ranks share after a step, in one network hop."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.pipeline.cache_consistency import CacheConsistency, Repair, Repaired
from thinpipe.pipeline.comm.channel import Channel, OutgoingChannel
from thinpipe.pipeline.comm.error_stats import SUMS, error_stats
from thinpipe.pipeline.comm.transport import Scope, Transport, shared_nbytes
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.replica_sync import LossScope
from thinpipe.pipeline.wire.told import DIRECTIONS, ComputeEvent, WireTotal


class _Scalars(NamedTuple):
    """The beginning of a rank's row of the vector; of all rows, a column or a sum for each."""

    loss: Any
    tokens: Any
    square_norm: Any
    busy_s: Any
    seconds: Any
    sync_bytes: Any
    weight_bytes: Any
    gradient_bytes: Any


_SCALARS = len(_Scalars._fields)
_COUNTS = 3  # of a direction: bytes, messages, values

_PIECE = 1 << 14  # values that are in fp64 at a time: 128 KiB


@dataclass(frozen=True)
class StepTotals:
    """A step as all ranks see it. `loss` is the mean over the tokens of all replicas.

    Of no tokens at all it is NaN, and the step is `skipped`, as one that is not finite is.

    In a step in which replicas do not meet (`ReplicaSync.due`) `loss` is the mean over the tokens
    of one, and counts are those of one times the replicas.

    `bubble` is the part of the step that the ranks did not compute, averaged over ranks.
    `sync_bytes` is what replicas (and the two copies of a tied weight) sent each other,
    `weight_bytes` and `gradient_bytes` what the shards of stages did, `control_bytes` the size of
    the exchange of these numbers and of what repairing took, all over all ranks. `repaired` counts
    samples of the next step whose cached rows differed or were lost. `notes` are warnings of
    the guard.
    """

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool
    seconds: float
    bubble: float
    wire: tuple[WireTotal, ...]
    sync_bytes: int
    control_bytes: int
    weight_bytes: int = 0
    gradient_bytes: int = 0
    repaired: Repaired = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankStep:
    """A step as this rank sees it. `sent` counts from the start of the run: what replicas exchange,
    and what shards send of weights and of gradients.
    """

    loss: float
    tokens: int
    square_norm: float
    seconds: float
    sent: tuple[int, int, int]
    events: Sequence[ComputeEvent]


class StepStats:
    """Collects this rank's numbers and shares them."""

    def __init__(
        self,
        transport: Transport,
        channels: Sequence[Channel],
        cuts: Sequence[int],
        *,
        loss_scope: LossScope,
    ) -> None:
        """`cuts` are all cuts of the pipeline, so that every rank lays its vector out alike;
        `loss_scope` says whose tokens a rank's loss is divided by.
        """
        self._transport, self._loss_scope = transport, loss_scope
        self._outgoing = [end for end in channels if isinstance(end, OutgoingChannel)]
        self._sent = (0, 0, 0)
        self.shared_WN = torch.empty(0, 0, dtype=torch.float64)
        """What the last `share` was made of."""
        self._coming_B = torch.empty(0, dtype=torch.int64)
        self.consistency = CacheConsistency(transport, channels, cuts)

    def begin_step(self, ids_B: torch.Tensor, upcoming_B: torch.Tensor) -> None:
        """Count traffic from here on: what evaluation sent is no part of a step.

        `ids_B` are this step's samples and `upcoming_B` the next one's, which caches fetch.
        """
        self._coming_B = upcoming_B[~torch.isin(upcoming_B, ids_B)]
        self.consistency.prefetch(upcoming_B)
        for channel in self._outgoing:
            channel.take_traffic()
            channel.codec.training.error_meter.take()

    def share(self, step: RankStep, scope: Scope) -> StepTotals:
        busy = math.fsum(e.end_s - e.start_s for e in step.events if e.computes)
        sent = [now - before for now, before in zip(step.sent, self._sent, strict=True)]
        self._sent = step.sent
        tokens = step.tokens if self._transport.mesh.position == 0 else 0
        scalars = _Scalars(step.loss, tokens, step.square_norm, busy, step.seconds, *sent)
        held = self.consistency.numbers(self._coming_B)
        mine = torch.tensor([*scalars, *held, *self._traffic()], dtype=torch.float64)
        self.shared_WN = all_WN = self._transport.share(mine, scope)
        held_WN = all_WN[:, _SCALARS : _SCALARS + len(held)]
        repair = self.consistency.repair(held_WN, self._coming_B, scope)
        return self._totals(all_WN, repair, scope, self._transport.mesh)

    def taken_over(self, shared_WN: torch.Tensor, mesh: Mesh, scope: Scope) -> StepTotals:
        """What `share` would have returned, of a step in which this rank lost the others.

        `shared_WN` is that of a rank which did not, `mesh` that of the step.
        """
        self.shared_WN = shared_WN
        return self._totals(shared_WN, Repair(), scope, mesh)

    def _totals(self, all_WN: torch.Tensor, repair: Repair, scope: Scope, mesh: Mesh) -> StepTotals:
        of_ranks = _Scalars(*all_WN[:, :_SCALARS].unbind(1))
        total = _Scalars(*all_WN[:, :_SCALARS].sum(0).tolist())
        loss = total.loss
        alike = mesh.replicas if scope == "replica" else 1
        if self._loss_scope == "replica" and scope == "world":
            loss = _mean_loss(of_ranks, mesh.replicas)
        ranks = mesh.pipeline_ranks * mesh.shards
        replica_norms = of_ranks.square_norm.reshape(-1, ranks).sum(1).sqrt()
        seconds = float(of_ranks.seconds.max())
        if not total.tokens:
            loss = math.nan  # of nothing: 0 would be the best there is
        finite = bool(torch.isfinite(replica_norms).all()) and math.isfinite(loss)
        return StepTotals(
            loss=loss,
            tokens=alike * int(total.tokens),
            grad_norm=float(replica_norms[mesh.replica if scope == "world" else 0]),
            skipped=not finite,
            seconds=seconds,
            bubble=1.0 - float(of_ranks.busy_s.mean()) / seconds,
            wire=self._wire(all_WN[:, _SCALARS + self.consistency.size :], alike),
            sync_bytes=alike * int(total.sync_bytes),
            weight_bytes=alike * int(total.weight_bytes),
            gradient_bytes=alike * int(total.gradient_bytes),
            control_bytes=alike * (shared_nbytes(all_WN) + repair.nbytes),
            repaired=repair.repaired,
        )

    def _traffic(self) -> list[float]:
        sent: dict[tuple[int, int], list[float]] = {}
        for channel in self._outgoing:
            traffic, codec = channel.take_traffic(), channel.codec
            counts = [traffic.nbytes, traffic.messages, traffic.values]
            sent[codec.cut, codec.direction] = counts + codec.training.error_meter.take()
        nothing = [0.0] * (_COUNTS + SUMS)
        return [n for place in self.consistency.places for n in sent.get(place, nothing)]

    def _wire(self, all_WN: torch.Tensor, alike: int) -> tuple[WireTotal, ...]:
        """Of the ranks W, each of which stands for as many others as there are replicas alike."""
        rows_PWN = all_WN.reshape(len(all_WN), -1, _COUNTS + SUMS).transpose(0, 1).tolist()
        return tuple(
            _wire_total(*place, rows * alike)
            for place, rows in zip(self.consistency.places, rows_PWN, strict=True)
        )


def _mean_loss(of_ranks: _Scalars, replicas: int) -> float:
    """Over the tokens of all replicas, of losses that are each replica's own mean."""
    columns = torch.stack([of_ranks.loss, of_ranks.tokens], 1)
    losses_R, tokens_R = columns.view(replicas, -1, 2).sum(1).unbind(1)
    return float((losses_R * tokens_R).sum() / tokens_R.sum().clamp(min=1))


def _wire_total(cut: int, direction: int, senders: Sequence[Sequence[float]]) -> WireTotal:
    counts = [row[:_COUNTS] for row in senders]
    nbytes, messages, values = (int(sum(column)) for column in zip(*counts, strict=True))
    return WireTotal(
        cut=cut,
        direction=DIRECTIONS[direction],
        nbytes=nbytes,
        messages=messages,
        values=values,
        **asdict(error_stats(*(row[_COUNTS:] for row in senders))),
    )


def square_norm(tensors: Sequence[Tensor]) -> float:
    """Of all values, in fp64: parts of tensors, as shards have them, add up to that of the whole.

    In fp32 the factor that clips differed in its last bit now and then, and weights with it. What
    fp64 leaves (some 1e-15) changes the factor, an fp32 number, once in 1e7 steps or less.
    """
    # pieces: a copy in fp64 of a whole embedding would be larger than anything else of a step
    pieces = [piece for tensor in tensors for piece in torch.split(tensor.flatten(), _PIECE)]
    if not pieces:
        return 0.0
    norms = torch._foreach_norm(pieces, dtype=torch.float64)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])  # one wait for a GPU
    return math.fsum(norm * norm for norm in together.tolist())
