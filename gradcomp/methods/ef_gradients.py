"""The largest gradients, a few bits each, on both ways, with error feedback on both.

CocktailSGD's codec without its subsets (Wang et al., ICML 2023) on gradients instead of moves: one
optimizer sees the same sums on all replicas, so its steps are as long as those of all-reduce, and
the bytes do not grow with the number of replicas as they do where each sends to all (`topk`).
`delayed`, sums travel during the next step and are applied with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.gradient_sync import GradientSync, Reducer, flat_gradients
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec

REPLICAS_EQUAL = True
GOES_ON = {"delayed": False}  # else they would have to agree on an exchange that is late


class Config(ExchangeOptions):
    """`fraction` of a message is sent, at `bits` each: 1 to 8, 16 (bf16) or 32 (fp32).

    `delayed`: an exchange has the time of a whole step, and is applied one step later.
    """

    fraction: float = Field(0.015, gt=0, le=1)
    bits: int = 4
    delayed: bool = False

    @property
    def codec(self) -> SparseCodec:
        return SparseCodec(self.fraction, self.bits, self.group)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    kind = DelayedGradientSync if config.delayed else GradientSync
    return kind(parameters, peers, ServedReducer(peers, config.codec), config.bucket_nbytes)


class DelayedGradientSync(GradientSync):
    """A `GradientSync` whose sums are a step late: a bucket has that time to be exchanged.

    The first step has none, its gradients are zeroed, and the last ones are not applied. What a
    reducer left out of a bucket is needed by the next exchange, before the optimizer applied this
    one: it counts as soon as the sum is there, unless that is not finite. All replicas see that
    alike, and the step that would apply it is skipped. A finite sum of a skipped step is applied
    with the next, as its residual counts already; what was not finite is dropped.
    """

    overlaps = True
    _takes_lanes = False  # what one bucket keeps would keep what another has begun

    _unapplied: Sequence[Tensor] = ()  # what gradients are, until the step counts

    def before_step(self) -> None:
        """Put the sums of the step before in place of the gradients; zeros in the first step."""
        self._readiness.finish()
        if self._step:
            late = self._overlap.join(len(self._buckets))
            if self._unapplied:
                late = [_both(*pair) for pair in zip(self._unapplied, late, strict=True)]
            self._put(late)
            self._unapplied = late
        else:
            for parameter in (p for bucket in self._buckets for p in bucket.parameters):
                assert parameter.grad is not None
                parameter.grad.zero_()
        self._step += 1

    def after_step(self) -> None:
        self._unapplied = ()

    def finish(self) -> None:
        self._overlap.wait()

    def state_dict(self) -> dict[str, Any]:
        under_way = self._overlap.save()  # waits: residuals of the reducer count then
        return {**super().state_dict(), **under_way, "unapplied": list(self._unapplied)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._overlap.restore(state)
        super().load_state_dict(state)
        self._unapplied = [
            sum_N.to(bucket.parameters[0].device)
            for bucket, sum_N in zip(self._buckets, state["unapplied"], strict=False)
        ]

    def _gradients(self, bucket: Bucket) -> Callable[[], Tensor]:
        """A copy made now: `before_step` overwrites gradients while they travel."""
        flat_N = flat_gradients(bucket)
        return lambda: flat_N

    @staticmethod
    def _reduce(reducer: Reducer, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        """What is left out counts once a sum is there."""
        sum_N = reducer.reduce(bucket, flat_N, key)
        if bool(sum_N.isfinite().all()):
            reducer.keep()
        else:
            reducer.drop()
        return sum_N


def _both(old_N: Tensor, new_N: Tensor) -> Tensor:
    """What is finite of them; the newer one if neither is."""
    if not bool(old_N.isfinite().all()):
        return new_N
    return old_N + new_N if bool(new_N.isfinite().all()) else old_N
