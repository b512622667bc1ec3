"""Methods that exchange gradients: buckets travel while backward still runs.

A method is a `Reducer`, which replaces a flat bucket by the sum over the replicas; `GradientSync`
is everything around it.

Axes: N values of a bucket.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinpipe.gradcomp.base import Kept, Stateless, WithinSteps
from thinpipe.gradcomp.buckets import Bucket, Readiness, device_of, make_buckets
from thinpipe.gradcomp.exchange import ExchangeKey, sum_sharded
from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.codec import Codec


class Reducer(Kept, Protocol):
    """Settings that tell methods apart that exchange gradients."""

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        """Return the sum over the replicas; runs on the communication thread."""

    def drop(self) -> None:
        """Forget what the step has changed."""

    def regroup(self, rank: int, size: int) -> None:
        """Replicas left or came, after a `keep` or `drop`; this one was `rank` of `size`."""

    def shared_state(self) -> dict[str, Any]:
        """The state of a replica that joins: what is alike on all, and nothing owed."""


class GradientSync(WithinSteps):
    """A `ReplicaSync` around a reducer. Replicas stay equal, since all apply the same sums.

    A step that the engine skips because something is not finite leaves no trace in the reducer's
    residuals.
    """

    replicas_equal = True
    overlaps = False  # the gradients that come last have the time of none

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        peers: Peers,
        reducer: Reducer,
        nbytes: int,
        *,
        alone: bool = False,
    ) -> None:
        """`nbytes` is the size of a bucket, in the parameters' own dtype.

        `alone`: the reducer has work to do for a single replica too.
        """
        self._peers, self._reducer, self._parameters = peers, reducer, parameters
        self._overlap = Overlap(device_of(parameters))
        self._step = 0
        self._make = partial(make_buckets, list(reversed(parameters)), nbytes)
        self._use(self._make() if alone or peers.size > 1 else ())

    def _use(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._readiness = Readiness(buckets, self._launch)

    def begin_step(self, step: int, passes: int) -> None:
        self._step = step
        self._readiness.begin_step(passes)

    def abandon(self) -> None:
        self._overlap.abandon()
        self._reducer.drop()

    def regroup(self, rank: int, size: int) -> None:
        self._reducer.regroup(rank, size)
        if self._peers.size > 1:
            self._make_once()

    def shared_state(self) -> dict[str, Any]:
        return {"reducer": self._reducer.shared_state()}

    def before_step(self) -> None:
        self._readiness.finish()
        self._put(self._overlap.join())

    def after_step(self) -> None:
        self._reducer.keep()

    def state_dict(self) -> dict[str, Any]:
        return {"reducer": self._reducer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reducer.load_state_dict(state["reducer"])

    def _make_once(self) -> None:
        """If it was alone."""
        if not self._buckets:
            self._use(self._make())

    def _launch(self, bucket: Bucket) -> None:
        self._fill(bucket)
        key = ExchangeKey(self._step, bucket.index)
        reducer = self._reducer  # the thread must not keep `self` alive
        # gradients stay as they are till `before_step`
        self._overlap.launch(lambda: reducer.reduce(bucket, flat_gradients(bucket), key), key.lane)

    def _fill(self, bucket: Bucket) -> None:
        """Zeros for parameters that were not used on this replica."""
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _put(self, sums: Sequence[Tensor]) -> None:
        for bucket, flat_N in zip(self._buckets if sums else (), sums, strict=True):
            for parameter, part in zip(bucket.parameters, bucket.views(flat_N), strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(part)


def flat_gradients(bucket: Bucket) -> Tensor:
    """A copy in fp32, end to end."""
    return torch.cat([p.grad.flatten().float() for p in bucket.parameters if p.grad is not None])


class AllReduce(Stateless):
    """A reducer whose servers send the sum of what they got."""

    def __init__(self, peers: Peers, codec: Codec) -> None:
        self._peers, self._codec = peers, codec

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        """Sum, with one rounding on each way."""
        return sum_sharded(self._peers, key, flat_N, codec=self._codec)
