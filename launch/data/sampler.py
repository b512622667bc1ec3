"""The samples of every optimizer step: a pure function of seed and step.

A run that goes on with another number of replicas in the middle of an epoch first divides anew what
was left of that epoch: no sample is left out or repeated.

Axes: B samples of a batch.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """Before `step`, each of `replicas` took `batch` samples per step, and `steps` were planned."""

    step: int
    replicas: int
    batch: int
    steps: int


def paced(step: int, changes: Sequence[Change], steps: int) -> float:
    """How far a run of `steps` has come, in steps of the one that was planned at first.

    A learning rate that depends on that does not jump at a change, and ends where it was to end.
    """
    if not changes:
        return step
    first, done, at = changes[0].steps, 0.0, 0
    for stop, planned in [*((c.step, c.steps) for c in changes), (max(step, steps), steps)]:
        rate = (first - done) / max(1, planned - at)
        if step <= stop:
            break
        done, at = done + rate * (stop - at), stop
    return done + rate * (step - at)


class _Order(NamedTuple):
    n: int
    seed: int
    shuffle: bool

    def of(self, count: int, purpose: str) -> Tensor:
        return shuffled(count, self.seed, purpose) if self.shuffle else torch.arange(count)


class _Share(NamedTuple):
    """Each of `replicas` takes `batch` samples per step.

    `alike`: equally many in every step. `masks`: samples can be kept from counting.
    """

    replicas: int
    batch: int
    alike: bool
    masks: bool


class _Stretch:
    """Steps from `first`, in `epoch`, in which equally many replicas share the samples.

    `rest` are the samples that are left of that epoch, if it began before. They visit the replica
    that has them in other epochs as long as it has room; replicas take equally many, or one more.
    """

    def __init__(
        self,
        order: _Order,
        share: _Share,
        *,
        first: int = 0,
        epoch: int = 0,
        rest: Tensor | None = None,
    ) -> None:
        self._order, self.share = order, share
        self._first, self.epoch = first, epoch
        self._cached: tuple[int, Tensor, dict[int, Tensor]] = (-1, torch.empty(0), {})
        self.per_epoch = -(-(order.n // share.replicas) // share.batch)
        self.left_out, self._fillers = 0, 0
        self.rest = None if rest is None else self._divided(rest)
        self._rest_steps = self.per_epoch
        if self.rest is not None:
            most, least = len(self.rest[0]), len(self.rest[-1])
            # rather one sample more in a step than a step in which a replica has none
            self._rest_steps = min(-(-most // share.batch), max(1, least))

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and how many of its steps, or of its rest's, come before."""
        if step < 0:
            raise ValueError(f"step = {step}: steps count from 0; use 0 or more")
        after = step - self._first - self._rest_steps
        if after < 0:
            return self.epoch, step - self._first
        return self.epoch + 1 + after // self.per_epoch, after % self.per_epoch

    def steps_of(self, epoch: int) -> range:
        """The steps of an epoch: of the first one those of its rest, of those before none."""
        if epoch < self.epoch:
            return range(self._first, self._first)
        stop = self._first + self._rest_steps + (epoch - self.epoch) * self.per_epoch
        return range(self._first if epoch == self.epoch else stop - self.per_epoch, stop)

    def ids(self, step: int, replica: int) -> Tensor:
        epoch, at = self.place(step)
        return self._until(epoch, at + 1, replica)[len(self._until(epoch, at, replica)) :].clone()

    def counted(self, step: int, replica: int) -> int:
        """How many of them count: not the last one if it only fills a place."""
        epoch, at = self.place(step)
        size = len(self._until(epoch, at + 1, replica)) - len(self._until(epoch, at, replica))
        last = step == self._first + self._rest_steps - 1
        return size - (last and self._fills(replica))

    def followed(self, step: int, share: _Share) -> "_Stretch":
        """The stretch that begins with `step`."""
        epoch, at = self.place(step)
        in_rest = self.rest is not None and epoch == self.epoch
        left = torch.full((self._order.n,), not in_rest)
        for replica, ids in enumerate((in_rest and self.rest) or ()):
            left[ids[: len(ids) - self._fills(replica)]] = True
        for replica in range(self.share.replicas):
            left[self._until(epoch, at, replica)] = False
        order = self._order.of(self._order.n, f"{epoch} from {step}")
        rest = None if bool(left.all()) else order[left[order]]
        return _Stretch(self._order, share, first=step, epoch=epoch, rest=rest)

    def _until(self, epoch: int, count: int, replica: int) -> Tensor:
        if self.rest is not None and epoch == self.epoch:
            own = self.rest[replica]
            size, more = divmod(len(own), max(1, self._rest_steps))
            return own[: count * size + min(count, more)]
        if self._cached[0] != epoch:
            used = self._order.n // self.share.replicas * self.share.replicas
            self._cached = epoch, self._order.of(used, str(epoch)), {}
        _, order, own_of = self._cached
        if replica not in own_of:
            own_of[replica] = order[order % self.share.replicas == replica]
        return own_of[replica][: count * self.share.batch]

    def _divided(self, rest: Tensor) -> list[Tensor]:
        """The rest by replica.

        Where replicas must take equally many, or some would have none, a sample of before fills
        the last place. Without masks, it could not be kept from counting: so few are left out.
        """
        replicas, replica_of = self.share.replicas, rest % self.share.replicas
        short = -len(rest) % replicas
        if short and (self.share.alike or len(rest) < replicas):
            self._fillers = short if self.share.masks else 0
            self.left_out = 0 if self.share.masks else len(rest) % replicas
            rest = rest[: len(rest) - self.left_out]
            replica_of = replica_of[: len(rest)]
        count, more = divmod(len(rest), replicas)
        room = [count + (replica < more) for replica in range(replicas)]
        own = [rest[replica_of == replica] for replica in range(replicas)]
        others = torch.cat([ids[most:] for ids, most in zip(own, room, strict=True)])
        lacks = [max(0, most - len(ids)) for ids, most in zip(own, room, strict=True)]
        places = zip(own, room, torch.split(others, lacks), strict=True)
        return [
            torch.cat([ids[:most], found, self._filler(rest, replica)[: self._fills(replica)]])
            for replica, (ids, most, found) in enumerate(places)
        ]

    def _fills(self, replica: int) -> bool:
        """Whether a replica's last sample of the rest only fills a place."""
        return replica >= self.share.replicas - self._fillers

    def _filler(self, rest: Tensor, replica: int) -> Tensor:
        """A sample that was visited before, if possible by this replica."""
        seen = torch.ones(self._order.n, dtype=torch.bool)
        seen[rest] = False
        ids = seen.nonzero().flatten()
        return ids[(ids % self.share.replicas != replica).argsort(stable=True)][:1]


class EpochSampler:
    """Chooses the samples of every optimizer step, for one replica.

    Each epoch visits every sample once, in an order drawn from the seed and the epoch, or without
    `shuffle` in that of their ids. Sample i always belongs to replica i % replicas, so cached
    activations stay valid. All replicas take equally many samples in each step; hence when the
    samples do not divide evenly, the last n % replicas of them are never used. `batch_size` counts
    the sequences of one step over all replicas; an epoch's last step may have fewer.

    What was left of an epoch when the number of replicas changed is visited too, each sample once,
    those that would have been dropped among them. Then replicas may take one more than others.

    Raises:
        ValueError: the batch does not divide over the replicas, a replica would have no samples,
            or `replica` is not below `replicas`.
    """

    def __init__(  # noqa: PLR0913  # what the samples of a step depend on
        self,
        n: int,
        *,
        batch_size: int,
        replicas: int,
        replica: int,
        seed: int,
        shuffle: bool = True,
        changes: Sequence[Change] = (),
        alike: bool = False,
        masks: bool = True,
    ) -> None:
        """`changes` say who took samples before, in order.

        `alike`: replicas must take equally many in the rest of an epoch too; `masks`: samples can
        be kept from counting in the loss.
        """
        if not 0 <= replica < replicas:
            raise ValueError(
                f"replica = {replica}: there are {replicas} replicas; use 0 to {replicas - 1}"
            )
        if batch_size < 1 or batch_size % replicas:
            raise ValueError(
                f"batch_size = {batch_size}: does not divide evenly over {replicas} replicas; "
                f"use {max(1, round(batch_size / replicas)) * replicas}"
            )
        if n < replicas:
            raise ValueError(
                f"{n} training sequences for {replicas} replicas: each needs at least one; "
                f"use at least {replicas} sequences or fewer replicas"
            )
        shares = [_Share(each.replicas, each.batch, alike, masks) for each in changes]
        shares.append(_Share(replicas, batch_size // replicas, alike, masks))
        self._now = _Stretch(_Order(n, seed, shuffle), shares[0])
        for change, share in zip(changes, shares[1:], strict=True):
            self._now = self._now.followed(change.step, share)
        self._replica = replica
        self._own = torch.arange(replica, n // replicas * replicas, replicas)
        self.left_out, self.steps_per_epoch = self._now.left_out, self._now.per_epoch

    def all_ids(self) -> Tensor:
        """Return the ids of all samples of this replica (int64, 1-d), in ascending order."""
        rest = [] if self._now.rest is None else [self._now.rest[self._replica]]
        found: Tensor = torch.unique(torch.cat([self._own, *rest]))
        return found

    def steps_of(self, epoch: int) -> range:
        """Return the steps of an epoch, of which the last change left none before it."""
        return self._now.steps_of(epoch)

    def steps(self, epochs: int, most: int | None) -> int:
        whole = self.steps_of(epochs - 1).stop
        return whole if most is None else min(whole, most)

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of a global optimizer step (from 0), after the last change."""
        return self._now.place(step)[0]

    def ids(self, step: int) -> Tensor:
        """Return this replica's sample ids (int64, 1-d) of a global optimizer step.

        Depends on nothing but the arguments here and of the constructor, so a resume needs no
        state.
        """
        return self._now.ids(step, self._replica)

    def counted(self, step: int) -> int:
        """Return how many of them, from the first, count in the loss."""
        return self._now.counted(step, self._replica)

    def samples(self, step: int) -> int:
        """Return how many samples count in a step, over all replicas."""
        replicas = self._now.share.replicas
        if self._now.rest is None or self.epoch(step) > self._now.epoch:
            return replicas * self.counted(step)
        return sum(self._now.counted(step, replica) for replica in range(replicas))


def shuffled(count: int, seed: int, purpose: str) -> Tensor:
    """The numbers below `count` in an order drawn for one purpose, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randperm(count, generator=generator)
