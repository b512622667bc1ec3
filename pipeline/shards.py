"""The Shards contract: a stage whose weights are spread over several ranks.

The engine calls it around every step; `gradcomp/sharded/` holds the implementation. To the engine
a sharded stage is a module whose parameters are this rank's shards.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Shards(Protocol):
    """Gathers weights and scatters gradients among the shards of this rank's stages.

    If an exchange fails, the call that waits for it raises a `TransportError` or `DesyncError`.
    """

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights this rank has sent to other sites so far, headers included."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients this rank has sent to other sites so far, headers included."""

    def begin_step(self, step: int, backwards: int) -> None:
        """A step begins, in which every stage runs backward this many times.

        Every trained parameter gets one gradient, as if it were computed here: its hooks run.
        """

    def before_step(self) -> None:
        """Wait for the sums over the shards, and leave in `p.grad` those of this rank's part."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, stages run forward alone."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
