"""The samples of every optimizer step: a pure function of seed and step.

Axes: B samples of a batch.
"""

import hashlib

import torch
from torch import Tensor


class EpochSampler:
    """Chooses the samples of every optimizer step, for one replica.

    Each epoch visits every sample once, in an order drawn from the seed and the epoch, or without
    `shuffle` in that of their ids. Sample i
    always belongs to replica i % replicas, so cached activations stay valid.
    All replicas take equally many samples in each step; hence when the samples do not divide
    evenly, the last n % replicas of them are never used (`dropped`). `batch_size` counts the
    sequences of one step over all replicas; an epoch's last step may have fewer.

    Raises:
        ValueError: the batch does not divide over the replicas, a replica would have no samples,
            or `replica` is not below `replicas`.
    """

    def __init__(
        self,
        n: int,
        *,
        batch_size: int,
        replicas: int,
        replica: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
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
        self.dropped = n % replicas
        self._n = n - self.dropped
        self._replicas = replicas
        self._replica = replica
        self._seed, self._shuffle = seed, shuffle
        self._batch = batch_size // replicas
        self._cached: tuple[int, Tensor] | None = None

    def all_ids(self) -> Tensor:
        """Return the ids of all samples of this replica (int64, 1-d), in ascending order."""
        return torch.arange(self._replica, self._n, self._replicas)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps in which every sample is visited once."""
        return -(-(self._n // self._replicas) // self._batch)

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of a global optimizer step (from 0).

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"step = {step}: steps count from 0; use 0 or more")
        return step // self.steps_per_epoch

    def ids(self, step: int) -> Tensor:
        """Return this replica's sample ids (int64, 1-d) of a global optimizer step.

        Depends on nothing but the arguments here and of the constructor, so a resume needs no
        state.

        Raises:
            ValueError: the step is negative.
        """
        order = self._order(self.epoch(step))
        start = step % self.steps_per_epoch * self._batch
        return order[start : start + self._batch].clone()

    def _order(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            order = torch.arange(self._n)
            if self._shuffle:
                order = shuffled(self._n, self._seed, str(epoch))
            self._cached = epoch, order[order % self._replicas == self._replica]
        return self._cached[1]


def shuffled(count: int, seed: int, purpose: str) -> Tensor:
    """The numbers below `count` in an order drawn for one purpose, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randperm(count, generator=generator)
