"""No exchange: the compute roof that other methods' step times are measured against.

Replicas drift apart; use it for timing, not for training.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from pydantic import BaseModel, ConfigDict
from torch import nn

from thinpipe.gradcomp.memories import Stateless
from thinpipe.pipeline.comm.transport import Peers

REPLICAS_EQUAL = False


class Config(BaseModel):
    """Replicas exchange nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoExchange(Stateless):
    """Leaves gradients and parameters as they are."""

    replicas_equal = REPLICAS_EQUAL
    leaves = "gradients"
    loss_scope = "replica"
    overlaps = True
    bytes_sent = 0

    def due(self, step: int) -> bool:
        return False

    def begin_step(self, step: int, passes: int) -> None: ...

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def finish(self) -> None: ...

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> NoExchange:
    """Make the method."""
    return NoExchange()
