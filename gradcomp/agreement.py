"""How far the replicas' gradients agree, measured by unit: rows of tall matrices, else tensors.

With g_w the gradients of the R replicas in a unit, and E running means as Adam's variance is one,

    own_w = E |g_w|^2        one = E mean_w |g_w|^2        rho = E |mean_w g_w|^2 / one

rho is 1 where replicas agree and 1 / R where gradients are independent noise. Local Adam divides by
the root of own_w where all-reduce's Adam divides by that of E |mean_w g_w|^2; so its moves in the
unit have to become sqrt(own_w / one) / sqrt(rho) times as large to be as long. The first factor is
for what few replicas see: rows of an embedding, whose tokens are rare.

|mean_w g_w|^2 is not sent but estimated: all replicas project their unit on the same random signs,
and the square of the mean of these projections is right on average. So two numbers per unit and
exchange travel. The early estimates, of a few projections, are drawn towards the mean of all units.

Axes: N values of all parameters, U units.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.gradcomp.buckets import device_of
from thinpipe.gradcomp.exchange import ExchangeKey, sum_sharded
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast

_TALL, _WIDE = 4, 64
"""A matrix with over 4 times as many rows as columns, of which it has 64, has a unit per row."""
_LONG = 4096
"""Columns at most that a vector is cut into."""
_ALL_OF, _THEN_EVERY = 64, 8
"""Exchanges that share what was measured: at first all."""
_PRIOR = 4.0
"""How many projections the mean of all units counts as."""
_MEMORY = 1000.0
"""Projections after which no more count."""
_BUCKET = 2**32 - 2
_CODEC = Cast("bf16")


class Agreement:
    """All replicas measure the same, from the same numbers; own_w is each one's own."""

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers, *, seed: int) -> None:
        self.beta2 = 0.999
        """Of Adam's variance."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._peers, self._seed = peers, seed
        self._rows = [_rows(p.shape) for p in self._parameters]
        self._device = device_of(self._parameters)
        self._own_U, self._one_U, self._mean_U = (
            torch.zeros(sum(self._rows), device=self._device) for _ in range(3)
        )
        self.sample_2U = torch.zeros(2, sum(self._rows), device=self._device)
        """This replica's projections and squares, as the last step found them."""
        self._steps = self._shared = self._shared_at = 0

    @staticmethod
    def shares(number: int) -> bool:
        """Whether exchange `number` shares what was measured."""
        return number < _ALL_OF or number % _THEN_EVERY == 0

    def sample(self) -> None:
        """Measure this replica's gradients, which are not summed yet, or those that all averaged.

        What was measured counts once `keep` is called.
        """
        generator = torch.Generator().manual_seed(self._seed + self._steps)
        projections, squares = [], []
        for parameter, rows in zip(self._parameters, self._rows, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            units = gradient.detach().float().reshape(rows, -1)
            matrix = units.reshape(-1, _width(gradient.shape))
            projected = matrix @ _signs(matrix.shape[1], generator, self._device)
            if rows == 1:
                projected = projected @ _signs(matrix.shape[0], generator, self._device)
            projections.append(projected.view(rows))
            squares.append(torch.linalg.vecdot(units, units))
        if projections:
            self.sample_2U = torch.stack([torch.cat(projections), torch.cat(squares)])

    def keep(self, *, averaged: bool = False) -> None:
        """The optimizer applied what was measured; `averaged`: the same on all replicas."""
        self._steps += 1
        self._own_U.lerp_(self.sample_2U[1], 1 - self.beta2)
        if averaged:
            self._one_U.lerp_(self.sample_2U[1], 1 - self.beta2)
            self._mean_U.lerp_(self.sample_2U[1], 1 - self.beta2)
            self._shared, self._shared_at = self._shared + 1, self._steps

    def share(self, number: int, sample_2U: Tensor) -> Tensor:
        """The mean of all replicas' samples, on the communication thread.

        Raises:
            TransportError, DesyncError: a replica is gone.
        """
        key = ExchangeKey(number, _BUCKET)
        summed = sum_sharded(self._peers, key, sample_2U.flatten(), codec=_CODEC)
        return summed.view_as(sample_2U) / self._peers.size

    def update(self, mean_2U: Tensor) -> None:
        if not bool(mean_2U.isfinite().all()):
            return
        weight = 1 - self.beta2 ** max(1, self._steps - self._shared_at)
        self._shared, self._shared_at = self._shared + 1, self._steps
        self._mean_U.lerp_(mean_2U[0].square(), weight)
        self._one_U.lerp_(mean_2U[1], weight)

    def gains(self, power: float) -> dict[nn.Parameter, Tensor]:
        """By how much to multiply moves of each parameter: sqrt(own / one) rho^(-power / 2).

        Tensors broadcast with the parameters; ones before anything was measured.
        """
        tiny = torch.finfo(torch.float32).tiny
        one_U = self._one_U.clamp_min(tiny)
        known = min(float(self._shared), _MEMORY)
        pooled = self._mean_U.sum() / one_U.sum()
        rho_U = (self._mean_U / one_U * known + _PRIOR * pooled) / (known + _PRIOR)
        rho_U = rho_U.clamp(0.5 / self._peers.size, 1.0)
        # what no replica has seen moves by weight decay alone, which all apply alike
        own_U = torch.where(self._one_U > 0, self._own_U / one_U, 1.0)
        own_U = own_U.clamp(0.0, float(self._peers.size))
        gain_U = own_U.sqrt() * rho_U.pow(-power / 2) if self._shared else torch.ones_like(one_U)
        parts = torch.split(gain_U, self._rows)
        return {
            p: part.view(-1, *[1] * (p.dim() - 1)) if p.dim() else part[0]
            for p, part in zip(self._parameters, parts, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "sample": self.sample_2U,
            "means": [self._own_U, self._one_U, self._mean_U],
            "counters": [self._steps, self._shared, self._shared_at],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sample_2U.copy_(state["sample"])
        kept = (self._own_U, self._one_U, self._mean_U)
        for mine, saved in zip(kept, state["means"], strict=True):
            mine.copy_(saved)
        self._steps, self._shared, self._shared_at = state["counters"]


def _rows(shape: torch.Size) -> int:
    tall = len(shape) == 2 and shape[0] > _TALL * shape[1] and shape[1] >= _WIDE
    return shape[0] if tall else 1


def _width(shape: torch.Size) -> int:
    """Columns of the matrix that is projected; long vectors are cut, to need fewer signs."""
    return shape[-1] if len(shape) > 1 else math.gcd(shape.numel(), _LONG)


def _signs(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    bits = torch.randint(0, 2, (count,), generator=generator)
    return (2 * bits - 1).to(device, torch.float32)
