"""Keeps the activation caches at the two ends of a cut equal, or drops what differs at both.

In the vector that ends every step, each end of a cut sends one number for what it holds of the next
step's samples. Where the numbers of two ends differ, or one has lost a row, all ranks take part in
one more exchange, which names the samples; both ends forget them, and their next visit is a first
visit. Nothing else is ever sent. Samples of the step that is ending are left out: their messages
proved both ends equal.

Axes: R DP ranks (`pipeline/mesh.py`), P ranks of a pipeline, C directions of cuts, E = 2 ends
(sender, receiver), B samples.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.pipeline.comm.boundary import Memory
from thinpipe.pipeline.comm.channel import Channel, IncomingChannel
from thinpipe.pipeline.comm.transport import Scope, Transport, shared_nbytes
from thinpipe.pipeline.wire.header import crc32
from thinpipe.pipeline.wire.told import BACKWARD, DIRECTIONS, FORWARD

_log = logging.getLogger(__name__)

Repaired = tuple[tuple[int, int], ...]
"""(cut, samples forgotten over all replicas and both directions), where there were any."""


class Repair(NamedTuple):
    """Forgotten samples, and the bytes that all ranks sent to find out which samples it is."""

    repaired: Repaired = ()
    nbytes: int = 0


class CacheConsistency:
    """The activation caches of this rank, and their share in what all ranks agree on."""

    def __init__(
        self, transport: Transport, channels: Sequence[Channel], cuts: Sequence[int]
    ) -> None:
        """`cuts` are all cuts of the pipeline, in the order that every rank uses."""
        self._transport = transport
        self.places = [(cut, direction) for cut in cuts for direction in (FORWARD, BACKWARD)]
        self._memories: dict[tuple[int, int], Memory] = {}  # by place and end
        for channel in channels:
            codec, end = channel.codec, isinstance(channel, IncomingChannel)
            if codec.memory is not None:
                place = self.places.index((codec.cut, codec.direction))
                self._memories[place, int(end)] = codec.memory

    @property
    def size(self) -> int:
        return 1 + 2 * len(self.places)

    def begin(self, ids_B: Tensor, first_ids_B: Tensor, samples: int = 0) -> Repaired:
        """Agree, before the first step, on how much is held, and of `ids_B`, on what.

        `ids_B` are all samples of this DP rank, `first_ids_B` those of the first step. It may have
        `samples` later, if that is more.

        Raises:
            OSError: this rank has no space for what was agreed.
        """
        self._agree_on_room(ids_B, samples)
        self._agree_on_what_was_learned()
        repaired = self._compare(ids_B, "world")
        self.prefetch(first_ids_B)
        return _sum(repaired, self._compare(first_ids_B, "world"))

    def go_on(self, ids_B: Tensor, next_ids_B: Tensor, samples: int, *, anew: bool) -> None:
        """Agree anew in this replica, as others left or came, or messages were lost.

        As `begin`; of samples, only those of the next step are compared. `anew`: nothing is held.
        """
        for memory in self._memories.values() if anew else ():
            memory.reset()
        self._agree_on_room(ids_B, samples)
        self._agree_on_what_was_learned()
        self.prefetch(next_ids_B)
        self._compare(next_ids_B, "replica")

    def release(self) -> None:
        for memory in self._memories.values():
            memory.release()

    def prefetch(self, ids_B: Tensor) -> None:
        for memory in self._memories.values():
            memory.prefetch(ids_B)

    def numbers(self, ids_B: Tensor) -> list[float]:
        """This rank's part of a shared vector: for each end, what it holds of these samples."""
        digests_CE = torch.zeros(len(self.places), 2, dtype=torch.float64)
        for end, memory in self._memories.items():
            prints_B = memory.fingerprints(ids_B)
            digests_CE[end] = -1 if bool((prints_B < 0).any()) else crc32(prints_B)
        return [float(len(ids_B)), *digests_CE.flatten().tolist()]

    def repair(self, all_WN: Tensor, ids_B: Tensor, scope: Scope) -> Repair:
        """Forget, at both ends, what the `numbers` of all ranks in the scope show to differ."""
        differs_C = _differ(self._per_end(all_WN[:, 1:])).any((0, 2))
        if not bool(differs_C.any()):
            return Repair()
        places = torch.nonzero(differs_C).flatten().tolist()
        count = int(all_WN[:, 0].max())
        prints_CEB = torch.zeros(len(places), 2, count, dtype=torch.float64)
        for i, place in enumerate(places):
            for end in (0, 1):
                if (place, end) in self._memories:
                    prints_B = self._memories[place, end].fingerprints(ids_B)
                    prints_CEB[i, end, : len(ids_B)] = prints_B
        shared_WN = self._transport.share(prints_CEB.flatten(), scope)
        wrong_RCB = _differ(self._per_end(shared_WN, count))
        mesh = self._transport.mesh
        dp_rank = mesh.dp_rank if scope == "world" else mesh.shard
        for i, place in enumerate(places):
            self._forget(place, ids_B[wrong_RCB[dp_rank, i, : len(ids_B)]])
        counts = wrong_RCB.sum((0, 2)).tolist()
        found = [((self.places[place][0], n),) for place, n in zip(places, counts, strict=True)]
        return Repair(_sum(*found), shared_nbytes(shared_WN))

    def _compare(self, ids_B: Tensor, scope: Scope) -> Repaired:
        mine = torch.tensor(self.numbers(ids_B), dtype=torch.float64)
        return self.repair(self._transport.share(mine, scope), ids_B, scope).repaired

    def _forget(self, place: int, ids_B: Tensor) -> None:
        for end in (0, 1):
            if (place, end) in self._memories and len(ids_B):
                self._memories[place, end].forget(ids_B)
                if end == 1:
                    shown = ", ".join(map(str, ids_B[:8].tolist()))
                    _log.warning(
                        "%s: the activation caches of its ends differed for, or lost, %d "
                        "samples (%s); they will be sent like new ones",
                        self._name(place),
                        len(ids_B),
                        shown if len(ids_B) <= 8 else f"{shown}, ...",
                    )

    def _agree_on_room(self, ids_B: Tensor, samples: int) -> None:
        """The smaller capacity of two ends counts."""

        def room(memory: Memory) -> float:
            return math.inf if memory.capacity is None else memory.capacity

        own_CE = self._of_pipeline(room, missing=math.inf).amin(0)
        for (place, _), memory in self._memories.items():
            most = max(len(ids_B), samples)
            memory.restrict(ids_B, int(min(float(own_CE[place].min()), most)))

    def _agree_on_what_was_learned(self) -> None:
        """Ends that have learned different things besides samples start again."""
        all_CE = self._of_pipeline(lambda memory: memory.learned(), missing=0.0).sum(0)
        for (place, end), memory in self._memories.items():
            if all_CE[place, 0] == all_CE[place, 1]:
                continue
            memory.reset()
            if end == 1:
                message = "%s: its ends had learned different things, and start again"
                _log.warning(message, self._name(place))

    def _of_pipeline(self, number: Callable[[Memory], float], *, missing: float) -> Tensor:
        """[P, C, E]: what each rank says of each end's memory, if it has that."""
        own_CE = torch.full((len(self.places), 2), missing, dtype=torch.float64)
        for end, memory in self._memories.items():
            own_CE[end] = number(memory)
        shared_PN = self._transport.share(own_CE.flatten(), "pipeline")
        return shared_PN.view(len(shared_PN), *own_CE.shape)

    def _name(self, place: int) -> str:
        cut, direction = self.places[place]
        return f"cut {cut} {DIRECTIONS[direction]}"

    def _per_end(self, all_WN: Tensor, count: int = 1) -> Tensor:
        """[R, C, E, B]: of the ranks of a pipeline, only one holds any given end."""
        pipeline_ranks = self._transport.mesh.pipeline_ranks
        dp_size, places = all_WN.shape[0] // pipeline_ranks, all_WN.shape[1] // (2 * count)
        return all_WN.reshape(dp_size, pipeline_ranks, places, 2, count).sum(1)


def _differ(prints_RCEB: Tensor) -> Tensor:
    """[R, C, B]: whether two ends hold different things, or one has lost something."""
    sender_RCB, receiver_RCB = prints_RCEB.unbind(2)
    return (sender_RCB != receiver_RCB) | (sender_RCB < 0) | (receiver_RCB < 0)


def _sum(*parts: Repaired) -> Repaired:
    total = Counter[int]()
    for cut, samples in chain(*parts):
        total[cut] += samples
    return tuple((cut, samples) for cut, samples in sorted(total.items()) if samples)
