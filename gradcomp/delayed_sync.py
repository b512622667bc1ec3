"""Gradients that travel beside the next step, and are applied with it.

A bucket has the time of a whole step to be exchanged. Every step applies the sums of the one
before; the first has none, its gradients are zeroed, and the last ones are not applied.

What a reducer left out of a bucket is needed by the next exchange, before the optimizer applied
this one: it counts as soon as the sum is there, unless that is not finite. All replicas see that
alike, and the step that would apply it is skipped.

Axes: N values of a bucket.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor, nn

from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.feedback import FeedbackReducer
from thinpipe.gradcomp.gradient_sync import GradientSync, Sums, flat_gradients
from thinpipe.pipeline.comm.transport import Peers


class DelayedGradientSync(GradientSync):
    """A `GradientSync` whose sums are a step late."""

    overlaps = True

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        peers: Peers,
        reducer: FeedbackReducer,
        nbytes: int,
    ) -> None:
        """As for `GradientSync`."""
        super().__init__(parameters, peers, _KeptAtOnce(reducer), nbytes)
        self._late: list[tuple[Bucket, Sums]] = []

    def before_step(self) -> None:
        """Put the sums of the step before in place of the gradients; zeros in the first step."""
        self._readiness.finish()
        if self._step == 0:
            for bucket, _ in self._launched:
                for parameter in bucket.parameters:
                    assert parameter.grad is not None
                    parameter.grad.zero_()
        self._put(self._late)
        self._late, self._launched = self._launched, []
        self._step += 1

    def finish(self) -> None:
        """No step follows that could apply the last sums."""
        self._wait()

    def state_dict(self) -> dict[str, Any]:
        """Also the sums that the next step applies."""
        self._wait()
        return {**super().state_dict(), "late": [sums.result()[0] for _, sums in self._late]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._wait()
        super().load_state_dict(state)
        self._late = []
        buckets = self._buckets if state["late"] else ()  # there are none before the first step
        for bucket, sum_N in zip(buckets, state["late"], strict=True):
            parameter = bucket.parameters[0]
            sums: Sums = Future()
            sums.set_result((sum_N.to(parameter.device), self._side_stream.now()))
            self._late.append((bucket, sums))

    def _wait(self) -> None:
        """Until the communication thread is done, or raise its failure."""
        for _, sums in self._late:
            self._side_stream.wait(sums.result()[1])

    def _gradients(self, bucket: Bucket) -> Callable[[], Tensor]:
        """A copy made now: `before_step` overwrites gradients while they travel."""
        flat_N = flat_gradients(bucket)
        return lambda: flat_N


class _KeptAtOnce:
    """A reducer whose residuals count once a sum is there."""

    def __init__(self, reducer: FeedbackReducer) -> None:
        self._reducer = reducer

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        """The sum over the replicas."""
        sum_N = self._reducer.reduce(bucket, flat_N, key)
        if bool(sum_N.isfinite().all()):
            self._reducer.keep()
        else:
            self._reducer.drop()
        return sum_N

    def keep(self) -> None:
        """Done."""

    def state_dict(self) -> dict[str, Any]:
        """The reducer's."""
        return self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._reducer.load_state_dict(state)
