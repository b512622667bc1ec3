"""Contiguous pieces of the parameters, and when backward has finished the gradients of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are exchanged together, laid end to end."""

    index: int
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """A vector of all, as tensors of the parameters' shapes."""
        parts = torch.split(flat_N, [parameter.numel() for parameter in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]


def make_buckets(parameters: Sequence[nn.Parameter], nbytes: int) -> tuple[Bucket, ...]:
    """Cut the trainable parameters, in their order, into buckets of about `nbytes`.

    A parameter is never cut: a bucket may be larger if it holds but one.
    """
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if not groups or groups[-1][0].dtype != parameter.dtype or size + parameter.nbytes > nbytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return tuple(Bucket(index, tuple(group)) for index, group in enumerate(groups))


def device_of(parameters: Sequence[nn.Parameter]) -> torch.device:
    """Where they all are; the CPU if there are none."""
    return parameters[0].device if parameters else torch.device("cpu")


class Readiness:
    """Calls `launch` for each bucket, in order, as soon as all its gradients are final.

    All replicas must launch in the same order, so a bucket waits for those before it. One that is
    not ready when backward is over (a parameter was not used, or the schedule computes gradients
    without autograd's hooks) is launched then.
    """

    def __init__(self, buckets: Sequence[Bucket], launch: Callable[[Bucket], None]) -> None:
        """`launch` is called on the thread that runs backward."""
        self._buckets, self._launch = tuple(buckets), launch
        self._missing = [0] * len(self._buckets)
        self._next = len(self._buckets)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = partial(self._on_gradient, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_step(self, passes: int) -> None:
        """Expect `passes` gradients of every parameter; 0 launches nothing before `finish`."""
        self._missing = [passes * len(bucket.parameters) or -1 for bucket in self._buckets]
        self._next = 0

    def finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = len(self._buckets)

    def _on_gradient(self, bucket: Bucket, parameter: Tensor) -> None:
        self._missing[bucket.index] -= 1
        if self._missing[bucket.index] < 0 and bucket.index < self._next:
            raise RuntimeError(
                f"bucket {bucket.index} got a gradient of {tuple(parameter.shape)} after it was "
                "exchanged: more backward passes ran than begin_step was called with"
            )
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._next += 1
            self._launch(self._buckets[self._next - 1])
