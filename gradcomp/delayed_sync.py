"""Gradients that travel beside the next step, and are applied with it.

A bucket has the time of a whole step to be exchanged. Every step applies the sums of the one
before; the first has none, its gradients are zeroed, and the last ones are not applied.

What a reducer left out of a bucket is needed by the next exchange, before the optimizer applied
this one: it counts as soon as the sum is there, unless that is not finite. All replicas see that
alike, and the step that would apply it is skipped. A finite sum of a skipped step is applied with
the next, as its residual counts already; what was not finite is dropped.

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
        self._unapplied: list[tuple[Bucket, Sums]] = []
        """What gradients are, until the step counts."""

    def before_step(self) -> None:
        """Put the sums of the step before in place of the gradients; zeros in the first step."""
        self._readiness.finish()
        if self._step == 0:
            for bucket, _ in self._launched:
                for parameter in bucket.parameters:
                    assert parameter.grad is not None
                    parameter.grad.zero_()
        if self._unapplied:
            pairs = zip(self._unapplied, self._late, strict=True)
            self._late = [(bucket, self._both(old, new)) for (bucket, old), (_, new) in pairs]
        self._put(self._late)
        self._unapplied, self._late, self._launched = self._late, self._launched, []
        self._step += 1

    def after_step(self) -> None:
        """The sums were applied."""
        self._unapplied = []

    def finish(self) -> None:
        """No step follows that could apply the last sums."""
        self._wait()

    def state_dict(self) -> dict[str, Any]:
        """Also the sums that the next step applies, and those that a skipped one did not."""
        self._wait()
        waiting = {"late": self._late, "unapplied": self._unapplied}
        held = {name: [sums.result()[0] for _, sums in each] for name, each in waiting.items()}
        return {**super().state_dict(), **held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._wait()
        super().load_state_dict(state)
        self._late, self._unapplied = map(self._restored, (state["late"], state["unapplied"]))

    def _restored(self, sums: Sequence[Tensor]) -> list[tuple[Bucket, Sums]]:
        buckets = self._buckets if sums else ()  # there are none before the first step
        return [
            (bucket, self._there(sum_N.to(bucket.parameters[0].device)))
            for bucket, sum_N in zip(buckets, sums, strict=True)
        ]

    def _there(self, sum_N: Tensor) -> Sums:
        sums: Sums = Future()
        sums.set_result((sum_N, self._side_stream.now()))
        return sums

    def _both(self, old: Sums, new: Sums) -> Sums:
        """What is finite of them; the newer one if neither is."""
        old_N, new_N = (self._side_stream.hand_over(*sums.result()) for sums in (old, new))
        if not bool(old_N.isfinite().all()):
            return new
        return self._there(old_N + new_N) if bool(new_N.isfinite().all()) else old

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
