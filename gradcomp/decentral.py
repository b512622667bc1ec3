"""Replicas that average their parameters with neighbours only, during forward and backward.

Lian et al. 2017; Gan et al., "BAGUA", VLDB 2022. The gradients of a step are those at the
parameters before they are averaged; the optimizer applies them afterwards. Nothing waits for all
replicas, and what a failed exchange was to change is unchanged.

There is no model that all stand for but the mean, which costs an all-reduce: it is made for
evaluations and checkpoints, by all replicas together, and they take it over when training ends.

Axes: N values of a bucket.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from thinpipe.gradcomp.base import BaseSync, Kept
from thinpipe.gradcomp.buckets import device_of, make_buckets
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, sum_sharded
from thinpipe.gradcomp.global_copy import FlatBucket, replaced
from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers


class Averaging(Kept, Protocol):
    """Settings that tell methods apart."""

    def begin(self, buckets: Sequence[FlatBucket]) -> None:
        """Replicas are equal: before the first step."""

    def average(self, bucket: FlatBucket, key: ExchangeKey) -> Tensor:
        """This replica's new parameters; runs on the communication thread."""


class Decentral(BaseSync):
    """A `ReplicaSync` around an averaging, every `interval` steps."""

    loss_scope = "replica"
    overlaps = True

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        peers: Peers,
        averaging: Averaging,
        *,
        nbytes: int,
        interval: int,
    ) -> None:
        """Parameters become views of flat vectors; they keep their values."""
        self._peers, self._averaging, self._interval = peers, averaging, interval
        buckets = make_buckets(parameters, nbytes) if peers.size > 1 else ()
        self._buckets = [FlatBucket(bucket) for bucket in buckets]
        self._overlap = Overlap(device_of(parameters))
        self._steps = self._exchanges = 0
        self._finished = False

    def due(self, step: int) -> bool:
        """No step waits for more than neighbours."""
        return False

    def begin_step(self, step: int, passes: int) -> None:
        if self._steps == 0:
            self._averaging.begin(self._buckets)
        if self._steps and self._steps % self._interval == 0:
            for bucket in self._buckets:
                bucket.check_storage()
            self._launch(self._averaging.average)
        self._steps += 1

    def before_step(self) -> None:
        for averages in self._overlap.join():
            self._averaging.keep()
            for bucket, average_N in zip(self._buckets, averages, strict=True):
                bucket.local_N.copy_(average_N)

    def finish(self) -> None:
        if not self._finished:
            for bucket, mean_N in zip(self._buckets, self._means(), strict=True):
                bucket.local_N.copy_(mean_N)
            self._finished = True

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext() if self._finished else replaced(self._buckets, self._means())

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "exchanges": self._exchanges,
            "finished": self._finished,
            "averaging": self._averaging.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._exchanges = state["steps"], state["exchanges"]
        self._finished = state["finished"]
        self._averaging.load_state_dict(state["averaging"])

    def _means(self) -> list[Tensor]:
        self._launch(partial(_mean, self._peers))
        (means,) = self._overlap.join()
        found: list[Tensor] = means
        return found

    def _launch(self, average: Callable[[FlatBucket, ExchangeKey], Tensor]) -> None:
        self._overlap.launch_each(
            [partial(average, b, ExchangeKey(self._exchanges, b.index)) for b in self._buckets]
        )
        self._exchanges += 1


def _mean(peers: Peers, bucket: FlatBucket, key: ExchangeKey) -> Tensor:
    return sum_sharded(peers, key, bucket.local_N.float(), codec=EXACT).div_(peers.size)
