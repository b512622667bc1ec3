"""Uncompressed all-reduce of the gradients: the baseline of every other method."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Config(BaseModel):
    """No options: gradients travel in their own dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AllReduce:
    """Sums one flat tensor of all gradients over the replicas (gloo's ring)."""

    replicas_equal = True

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """`group` holds the replicas of the stages that own `parameters`."""
        self.bytes_sent = 0
        self._parameters, self._group = parameters, group

    def before_step(self) -> None:
        """Sum the gradients; a parameter without one counts as zero on this replica."""
        size = dist.get_world_size(self._group)
        if size == 1:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [_gradient(parameter) for parameter in self._parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._group)
        self.bytes_sent += 2 * (size - 1) * flat.nbytes // size  # what a ring all-reduce sends
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def after_step(self) -> None:
        """Parameters moved alike; nothing to exchange."""

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no state."""


def build(
    config: Config, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> AllReduce:
    """Make the method."""
    return AllReduce(parameters, group)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
