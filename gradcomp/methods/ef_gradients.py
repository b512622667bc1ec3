"""The largest gradients, a few bits each, on both ways, with error feedback on both.

CocktailSGD's codec without its subsets (Wang et al., ICML 2023) on gradients instead of moves: one
optimizer sees the same sums on all replicas, so its steps are as long as those of all-reduce, and
the bytes do not grow with the number of replicas as they do where each sends to all (`topk`).
`delayed`, sums travel during the next step and are applied with it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.buckets import Bucket, device_of
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.gradient_sync import GradientSync, flat_gradients
from thinpipe.gradcomp.late import LateExchange
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec

REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}


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
    reducer = ServedReducer(peers, config.codec)
    kind = DelayedGradientSync if config.delayed else GradientSync
    return kind(parameters, peers, reducer, config.bucket_nbytes)


class DelayedGradientSync(GradientSync):
    """A `GradientSync` whose sums are a step late: they are exchanged during the next step.

    The first step has none, its gradients are zeroed, and the last ones are not applied. A step is
    skipped on all replicas alike: a finite sum that it was given is applied with the next; what was
    not finite is dropped, as is what it would leave for later.
    """

    overlaps = True
    _reducer: ServedReducer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._late = LateExchange(self._overlap, self._exchange)
        self._own: list[Tensor] = []  # gradients of this step, once it is over
        self._given: list[Tensor] = []  # the sums that it applies
        self._unapplied: list[Tensor] = []  # those of one that was skipped

    def begin_step(self, step: int, passes: int) -> None:
        super().begin_step(step, passes)
        self._own = []
        self._late.begin()

    def before_step(self) -> None:
        """Put the sums of the step before in place of the gradients; zeros if there are none."""
        self._readiness.finish()
        self._given = _all_of(self._unapplied, self._late.wait())
        self._put(self._given or [torch.zeros_like(own_N) for own_N in self._own])

    def commit(self) -> None:
        if self._own:
            self._late.take()
            self._reducer.keep()
            self._late.pending, self._own = self._own, []
            self._unapplied, self._given = self._given, []

    def after_step(self) -> None:
        self._unapplied = []

    def abandon(self) -> None:
        self._late.abandon()
        self._reducer.drop()
        self._own = []

    def shared_state(self) -> dict[str, Any]:
        """Who joins has no gradients to be exchanged with the others'."""
        pending = self._late.pending is not None
        return {**super().shared_state(), "pending": pending, "unapplied": self._unapplied}

    def state_dict(self) -> dict[str, Any]:
        pending = self._late.pending or []
        return {**super().state_dict(), "pending": pending, "unapplied": self._unapplied}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # an earlier version's checkpoint holds the sums that it had found
        pending, device = state.get("pending"), device_of(self._parameters)
        unapplied = _all_of(state["unapplied"], state.get("under_way", []))
        if pending or unapplied:  # there were more replicas, or this one has just come
            self._make_once()
        if pending is True:
            pending = [torch.zeros(bucket.numel) for bucket in self._buckets]
        self._late.pending = [own_N.to(device) for own_N in pending or ()] or None
        self._unapplied = [sum_N.to(device) for sum_N in unapplied]

    def _launch(self, bucket: Bucket) -> None:
        """A copy now: `before_step` overwrites gradients."""
        self._fill(bucket)
        self._own.append(flat_gradients(bucket))

    def _exchange(self, pending: Sequence[Tensor]) -> None:
        reducer, step = self._reducer, self._step
        for bucket, own_N in zip(self._buckets, pending, strict=True):
            key = ExchangeKey(step, bucket.index)
            job = partial(_reduced, reducer, bucket, own_N, key)
            self._overlap.launch(job, key.lane)


def _reduced(reducer: ServedReducer, bucket: Bucket, own_N: Tensor, key: ExchangeKey) -> Tensor:
    """The sum; what it leaves for later counts if it is finite."""
    sum_N = reducer.reduce(bucket, own_N.clone(), key)  # which adds to it
    if not bool(sum_N.isfinite().all()):
        reducer.forget(bucket)
    return sum_N


def _all_of(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Sums of buckets, of none, one or two steps."""
    if old and new:
        return [_both(*pair) for pair in zip(old, new, strict=True)]
    return old or new


def _both(old_N: Tensor, new_N: Tensor) -> Tensor:
    """What is finite of them; the newer one if neither is."""
    if not bool(old_N.isfinite().all()):
        return new_N
    return old_N + new_N if bool(new_N.isfinite().all()) else old_N
