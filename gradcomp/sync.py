"""The ReplicaSync contract: how the replicas of one stage stay together."""

from collections.abc import Mapping
from typing import Any, Protocol


class ReplicaSync(Protocol):
    """Exchanges what replicas must share; called by the engine around every optimizer step.

    The loss is already divided by the tokens of all replicas, so gradients are to be summed.
    """

    replicas_equal: bool
    """Whether parameters are equal on all replicas after every step."""

    bytes_sent: int
    """Payload bytes this rank has sent so far."""

    def before_step(self) -> None:
        """Gradients are local; leave in `p.grad` what the optimizer is to apply."""

    def after_step(self) -> None:
        """Parameters moved; exchange them here if the method does."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
