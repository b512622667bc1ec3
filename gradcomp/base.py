"""Bases of methods: defaults of the ReplicaSync contract, and state kept from step to step."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

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


class Stateless:
    """Of a method without state."""

    def keep(self) -> None: ...

    def drop(self) -> None: ...

    def regroup(self, rank: int, size: int) -> None: ...

    def shared_state(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Staged:
    """Tensors by name. What a step sets counts once `keep` is called."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._fresh: dict[str, Tensor] = {}

    def get(self, name: str, device: torch.device) -> Tensor | None:
        """What counts; restored tensors are in host memory until then."""
        kept = self._kept.get(name)
        return None if kept is None else kept.to(device)

    def set(self, name: str, value: Tensor) -> None:
        """Takes the tensor over."""
        self._fresh[name] = value

    def keep(self) -> None:
        """The step counts. Without this call the next step overwrites what it set."""
        self._kept.update(self._fresh)
        self._fresh.clear()

    def drop(self) -> None:
        self._fresh.clear()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept, self._fresh = dict(state), {}
