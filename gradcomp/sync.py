"""The ReplicaSync contract: how the replicas of one stage stay together."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class ReplicaSync(Protocol):
    """Exchanges what replicas must share; called by the engine around every optimizer step.

    The loss is already divided by the tokens of all replicas, so gradients are to be summed. If an
    exchange fails, the call that needs it raises, and parameters are as before the exchange.
    """

    replicas_equal: bool
    """Whether parameters are equal on all replicas after every step."""

    bytes_sent: int
    """Bytes this rank has sent so far, headers included."""

    def begin_step(self, passes: int) -> None:
        """A step begins; every parameter will get `passes` gradients (0: not known)."""

    def before_step(self) -> None:
        """Gradients are local; leave in `p.grad` what the optimizer is to apply."""

    def after_step(self) -> None:
        """Parameters moved; exchange them here if the method does. Not called if they did not."""

    def global_parameters(self) -> AbstractContextManager[None]:
        """Inside, parameters are those of the one model that all replicas stand for.

        Where replicas differ, evaluation and what is to be used after training need it.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; parameters were restored before."""
