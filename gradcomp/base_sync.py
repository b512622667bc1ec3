"""Defaults of the ReplicaSync contract: a method's class has only what is special about it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.replica_sync import LossScope


class Kept(Protocol):
    """State of a method's part. What a step changes counts once `keep` is called."""

    def keep(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BaseSync:
    """A `ReplicaSync` whose replicas wait for each other in every step, and exchange nothing."""

    replicas_equal = False
    leaves = "gradients"
    loss_scope: LossScope = "global"
    overlaps = False
    _peers: Peers

    @property
    def bytes_sent(self) -> int:
        return self._peers.bytes_sent

    def due(self, step: int) -> bool:
        return True

    def begin_step(self, step: int, passes: int) -> None: ...

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def finish(self) -> None: ...

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()
