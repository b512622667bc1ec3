"""No exchange: the compute roof that other methods' step times are measured against.

Replicas drift apart; use it for timing, not for training.
"""

from collections.abc import Sequence

from pydantic import BaseModel
from torch import nn

from thinpipe.gradcomp.base import BaseSync, Stateless
from thinpipe.pipeline.comm.transport import Peers

REPLICAS_EQUAL = False


class Config(BaseModel, frozen=True, extra="forbid"):
    """Replicas exchange nothing."""


class NoExchange(BaseSync, Stateless):
    """Leaves gradients and parameters as they are."""

    loss_scope = "replica"
    overlaps = True
    bytes_sent = 0

    def due(self, step: int) -> bool:
        return False


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> NoExchange:
    return NoExchange()
