"""The ReplicaSync contract: how the replicas of one stage stay together.

The engine calls it around every optimizer step; `gradcomp/methods/` holds the implementations.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import Tensor

LossScope = Literal["global", "replica"]
"""Whose tokens a loss is divided by: those of all replicas, or of this one."""


class ReplicaSync(Protocol):
    """Exchanges what replicas must share.

    If an exchange fails, each call that waits for it raises a `TransportError` or `DesyncError`,
    and parameters are as before the exchange. So a failure is raised before anything is evaluated
    or saved.
    """

    replicas_equal: bool
    """Whether parameters are equal on all replicas after every step."""

    leaves: Literal["gradients", "updates"]
    """Content of `p.grad` after `before_step`. Updates are not clipped."""

    loss_scope: LossScope
    """Whose tokens the loss is divided by where it is differentiated."""

    overlaps: bool
    """Whether an exchange has the time of a whole forward and backward."""

    bytes_sent: int
    """Bytes this rank has sent so far, headers included."""

    def due(self, step: int) -> bool:
        """Whether this step waits for all replicas; if not, at most neighbours share anything."""

    def begin_step(self, step: int, passes: int) -> None:
        """A step of the run begins; parameters will get `passes` gradients each (0: not known)."""

    def before_step(self) -> None:
        """Gradients are local; leave in `p.grad` what the optimizer is to apply."""

    def commit(self) -> None:
        """What `before_step` waited for counts.

        Called after all ranks have shared the step's vector, before the optimizer, also if the step
        is skipped.
        """

    def after_step(self) -> None:
        """Parameters moved; exchange them here if the method does. Not called if they did not."""

    def finish(self) -> None:
        """Apply what is still under way.

        Every replica calls it when the last step is done, before the last evaluation and
        checkpoint. Not before others: an exchange applied early would change training.
        """

    def alike(self) -> list[Tensor]:
        """What is equal on all replicas between steps, though their parameters differ."""

    def global_parameters(self) -> AbstractContextManager[None]:
        """Inside, parameters are those of the one model that all replicas stand for.

        Where replicas differ, evaluation and what is to be used after training need it; all of them
        call it at the same time, as that model may have to be made. What is under way is not
        applied: training goes on as without this call.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a restart. Waits for what is under way, and changes nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; parameters were restored before."""
