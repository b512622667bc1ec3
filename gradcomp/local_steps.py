"""Replicas that train by themselves for many steps, and then exchange how far they have come.

DiLoCo (Douillard et al. 2023), its streaming form (Douillard et al. 2025), SparseLoCo (Sarfi et al.
2025) and asynchronous averaging (BAGUA) are this with different `OuterStep`s:

    x   `SharedBucket.local_N`     this replica's parameters, moved by its own optimizer
    g   `SharedBucket.global_N`    the global model, equal on all replicas bit for bit

    1.  d_w = g - x_w                    of one fragment, every `interval` steps
    2.  u = outer step of all d_w        during the next `overlap` steps of training
    3.  g -= u;  x_w = (1 - mix) g + mix x_w, or, without a mix, x_w + g - x_w as of 1.

Fragments take turns, `interval / fragments` steps apart. Steps are counted where all replicas
agree, at their beginning, whether a step is skipped on one of them or not. Between exchanges
nothing waits for another replica, but for the digests of `train.verify_every`. 3. is done by the
training thread once everything has arrived: a failed exchange changes nothing, and can be made
again by those who are left, from where they are then.

Axes: N values of a bucket.
"""

import operator
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from thinpipe.gradcomp.base import BaseSync, Hold, Kept
from thinpipe.gradcomp.buckets import Bucket, device_of, make_buckets
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.global_copy import SharedBucket, replaced
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers


class TurnsConfig(ExchangeOptions):
    """`interval` steps lie between two exchanges of a fragment, of which there are `fragments`.

    An exchange has the time of `overlap` steps, 0: training waits for it.
    """

    interval: int = Field(30, ge=1)
    fragments: int = Field(1, ge=1)
    overlap: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> "TurnsConfig":
        if self.interval % self.fragments:
            raise ValueError(
                f"interval = {self.interval}, fragments = {self.fragments}: fragments take turns; "
                "use an interval that is a multiple of them"
            )
        if self.overlap >= self.turn:
            raise ValueError(
                f"overlap = {self.overlap}: a fragment is exchanged every {self.turn} steps "
                "(interval / fragments); use less than that"
            )
        return self

    @property
    def turn(self) -> int:
        return self.interval // self.fragments


class LocalStepsConfig(TurnsConfig):
    """`mix` is how much of its own parameters a replica keeps when the global ones arrive."""

    mix: float = Field(0.0, ge=0, lt=1)


class OuterStep(Kept, Protocol):
    """Settings that tell methods apart."""

    def update(self, index: int, distance_N: Tensor, key: ExchangeKey) -> Tensor:
        """By how much the global model moves; runs on the communication thread.

        `distance_N` is how far it is ahead of this replica. `keep` is called when all updates of
        a fragment have arrived.
        """

    def drop(self) -> None:
        """Forget what an exchange has changed that failed."""

    def shared_state(self) -> dict[str, Any]:
        """What is equal on all replicas."""

    def staged(self) -> dict[str, Any]:
        """What `update` has changed and `keep` has not kept."""

    def stage(self, state: Mapping[str, Any]) -> None:
        """Restore it."""


class LocalSteps(BaseSync):
    """A `ReplicaSync` around an outer step."""

    loss_scope = "replica"

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        peers: Peers,
        config: TurnsConfig,
        outer: OuterStep,
        *,
        mix: float | None,
    ) -> None:
        """Parameters become views of flat vectors; they keep their values.

        Without a mix all that was learnt during an exchange is kept.
        """
        self._peers, self._config, self._outer, self._mix = peers, config, outer, mix
        self.overlaps = config.overlap > 0
        self._make, self._making = partial(_fragments, parameters, config), threading.Lock()
        self._fragments: list[list[SharedBucket]] = [[] for _ in range(config.fragments)]
        if peers.size > 1:
            self._fragments = self._make()
        self._overlap = Overlap(device_of(parameters))
        self._captured = False
        self._exchanges = self._met = 0
        self._pending: int | None = None
        """A fragment whose exchange began and does not count yet, maybe to be made again."""
        self._counts = False  # what came of it, as soon as all replicas have met

    def due(self, step: int) -> bool:
        turn = self._config.turn
        return step >= turn and step % turn in (0, self._config.overlap)

    def begin_step(self, step: int, passes: int) -> None:
        self.meet(step, operator.call)
        if self.overlaps and self._is_turn(step):
            self._pending = self._fragment(step)
            self._launch(self._pending)

    def meet(self, step: int, hold: Hold) -> bool:
        """Have the exchange of a fragment count; make it, if it is not under way."""
        self._capture()
        if not self.overlaps and self.lets_in(step):
            self._pending = self._fragment(step)
        if self._pending is None or step % self._config.turn != self._config.overlap:
            return False
        self._exchange(self._pending, hold)
        self._met = step
        return True

    def lets_in(self, step: int) -> bool:
        """Asked before an exchange of this step begins."""
        return self._is_turn(step) and step > self._met

    def finish(self) -> None:
        self.finish_by(operator.call)

    def finish_by(self, hold: Hold) -> None:
        """Exchange all fragments once more: replicas are equal to the global model then."""
        if self._captured:
            if self._pending is not None:
                self._exchange(self._pending, hold)
            for number in range(len(self._fragments)):
                self._exchange(number, hold)
            for bucket in self._all():
                bucket.local_N.copy_(bucket.global_N)
            self._captured = False  # nothing is left to exchange

    def settle(self) -> None:
        self._overlap.settle()

    def abandon(self) -> None:
        self._overlap.abandon()
        self._counts = False
        self._outer.drop()

    def regroup(self, rank: int, size: int) -> None:
        if not self._counts:  # it may have failed on others
            self.abandon()
        if self._peers.size > 1:
            self._make_once()

    def parameters_to_give(self) -> AbstractContextManager[None]:
        return self.global_parameters()

    def shared_state(self) -> dict[str, Any]:
        """Parameters are the global ones, which are not sent twice where those are fp32.

        It owes what this replica does, in place of what a lost one owed.
        """
        return {
            "under_way": [],  # nobody joins in one
            "exchanges": self._exchanges,
            "captured": self._captured,
            "met": self._met,
            "global": [None if b.left_N is None else b.global_N for b in self._all()],
            "outer": self._outer.state_dict(),
        }

    def alike(self) -> list[Tensor]:
        state = self._outer.shared_state()
        return [*(b.global_N for b in self._all()), *(state[name] for name in sorted(state))]

    def global_parameters(self) -> AbstractContextManager[None]:
        buckets = self._all() if self._captured else ()
        return replaced(buckets, [bucket.global_N for bucket in buckets])

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._overlap.save(),
            "pending": self._pending,
            "exchanges": self._exchanges,
            "captured": self._captured,
            "global": [bucket.global_N for bucket in self._all()],
            "outer": self._outer.state_dict(),
            "staged": self._outer.staged(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._overlap.restore(state)
        under_way = next((fragment for fragment, *_ in state["under_way"]), None)
        self._pending = state.get("pending", under_way)
        self._exchanges, self._captured = state["exchanges"], state["captured"]
        self._outer.load_state_dict(state["outer"])
        self._outer.stage(state.get("staged", {}))
        self._met = state.get("met", 0)
        if state["global"]:  # a newcomer may be alone as yet
            self._make_once()
        for bucket, global_N in zip(self._all(), state["global"], strict=True):
            bucket.global_N.copy_(bucket.local_N if global_N is None else global_N)

    def _make_once(self) -> None:
        """If it was alone; a newcomer's state may come in another thread."""
        with self._making:
            if not self._all():
                self._fragments = self._make()

    def _all(self) -> list[SharedBucket]:
        return [bucket for fragment in self._fragments for bucket in fragment]

    def _capture(self) -> None:
        """The first step finds replicas equal: what they hold becomes the global model."""
        if not self._captured:
            self._captured = True
            for bucket in self._all():
                bucket.capture()

    def _is_turn(self, step: int) -> bool:
        return step > 0 and step % self._config.turn == 0

    def _fragment(self, step: int) -> int:
        return (step // self._config.turn - 1) % self._config.fragments

    def _exchange(self, fragment: int, hold: Hold) -> None:
        def exchange() -> None:
            if self._overlap.is_empty:
                self._launch(fragment)
            self._overlap.wait()
            self._counts = True

        hold(exchange)
        self._join()

    def _launch(self, fragment: int) -> None:
        buckets = self._fragments[fragment]
        for bucket in buckets:
            bucket.check_storage()
        distances = [bucket.global_N - bucket.local_N for bucket in buckets]
        # replicas that did not start from one model are noticed in the first exchange
        first = self._exchanges == 0
        keys = [
            ExchangeKey(self._exchanges, bucket.index, bucket.digest() if first else 0)
            for bucket in buckets
        ]
        self._overlap.launch(partial(_exchange, self._outer, fragment, keys, distances))

    def _join(self) -> None:
        for fragment, distances, updates in self._overlap.join():
            self._outer.keep()
            self._exchanges += 1
            with torch.no_grad():
                for bucket, distance_N, update_N in zip(
                    self._fragments[fragment], distances, updates, strict=True
                ):
                    self._apply(bucket, distance_N, update_N)
        self._pending, self._counts = None, False

    def _apply(self, bucket: SharedBucket, distance_N: Tensor, update_N: Tensor) -> None:
        bucket.global_N -= update_N
        if self._mix is None:
            bucket.local_N.add_((distance_N - update_N).to(bucket.local_N.dtype))
            return
        global_N = bucket.global_N.to(bucket.local_N.dtype)
        bucket.local_N.mul_(self._mix).add_(global_N, alpha=1 - self._mix)


def _exchange(
    outer: OuterStep, fragment: int, keys: Sequence[ExchangeKey], distances: list[Tensor]
) -> tuple[int, list[Tensor], list[Tensor]]:
    """Which fragment, how far it was ahead of this replica, and by how much it moves."""
    updates = [
        outer.update(key.bucket, distance_N, key)
        for key, distance_N in zip(keys, distances, strict=True)
    ]
    return fragment, distances, updates


def _fragments(parameters: Sequence[nn.Parameter], config: TurnsConfig) -> list[list[SharedBucket]]:
    """Buckets, dealt into as many groups of about equal size."""
    groups: list[list[Bucket]] = [[] for _ in range(config.fragments)]
    buckets = make_buckets(parameters, config.bucket_nbytes)
    for bucket in sorted(buckets, key=lambda bucket: -bucket.numel):
        min(groups, key=lambda group: sum(b.numel for b in group)).append(bucket)
    return [[SharedBucket(bucket) for bucket in group] for group in groups]
