"""No exchange: the compute roof that other methods' step times are measured against.

Replicas drift apart; use it for timing, not for training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn


class Config(BaseModel):
    """No options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoExchange:
    """Leaves gradients and parameters as they are."""

    replicas_equal = False
    bytes_sent = 0

    def before_step(self) -> None:
        """Nothing is exchanged."""

    def after_step(self) -> None:
        """Nothing is exchanged."""

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no state."""


def build(
    config: Config, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> NoExchange:
    """Make the method."""
    return NoExchange()
