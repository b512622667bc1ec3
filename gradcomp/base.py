"""Bases of methods: defaults of the ReplicaSync contract, and state kept from step to step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from thinpipe.gradcomp.overlap import Overlap
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.replica_sync import LossScope, ReplicaSync


class Kept(Protocol):
    """State of a method's part. What a step changes counts once `keep` is called."""

    def keep(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


Hold = Callable[[Callable[[], object]], object]
"""Makes an exchange count for all replicas or for none: it may call it again, after `abandon`."""


class GoesOn(ReplicaSync, Protocol):
    """A `ReplicaSync` whose replicas go on when one is lost, and let others in (GOES_ON).

    | state                       | a replica leaves               | a replica joins       |
    |:----------------------------|:-------------------------------|:----------------------|
    | parameters, optimizer       | stay, of local steps unmet too | those of replica 0 ¹  |
    | global copy, outer momentum | stay, equal on all             | those of all          |
    | residuals, owed moves       | its own are lost               | it begins with none ² |
    | residuals of shards ⁴       | its own are lost, others' sent | it begins with none   |
    | local steps since they met  | its own are lost               | it begins with none   |
    | an exchange under way       | is made again, and waited for  | there is none ³       |

    A rank that completes another replica keeps what it has.

    ¹ Moments of local steps, and with `cocktail`, are older by as long as they were sent.
    ² With local steps and `cocktail` with replica 0's: about what the lost one owed.
    ³ Delayed exchanges run in each step. Who joins takes part with what replica 0 sends, with
      `ef_gradients` with zeros.
    ⁴ With `cocktail` all are dropped: losses were the same.
    """

    sends_ahead: bool
    """Whether what replicas have in common is worth sending before one joins: it does not change
    in every step, or those changes follow.
    """

    def meet(self, step: int, hold: Hold) -> bool:
        """Hold the meeting before a step, if there is one that is not part of a step.

        Whether there was: what replicas hold alike has changed.
        """

    def lets_in(self, step: int) -> bool:
        """Whether a replica can join before this step, and its meeting."""

    def finish_by(self, hold: Hold) -> None:
        """As `finish`."""

    def settle(self) -> None:
        """Wait for exchanges under way, which have failed or are about to."""

    def abandon(self) -> None:
        """Forget the step or meeting under way, whose exchanges have failed."""

    def regroup(self, rank: int, size: int) -> None:
        """Replicas left or came between two steps; this one was `rank` of `size`."""

    def parameters_to_give(self) -> AbstractContextManager[None]:
        """Inside, parameters are those with which a replica joins."""

    def shared_state(self) -> dict[str, Any]:
        """What it loads then: as `state_dict`, but for what it owes (as above)."""


class BaseSync:
    """A `ReplicaSync` whose replicas wait for each other in every step, and exchange nothing."""

    replicas_equal = False
    sends_ahead = True
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

    def commit(self) -> None: ...

    def after_step(self) -> None: ...

    def finish(self) -> None: ...

    def alike(self) -> list[Tensor]:
        return []

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()


class WithinSteps(BaseSync):
    """A `GoesOn` without meetings between steps."""

    _overlap: Overlap

    def meet(self, step: int, hold: Hold) -> bool:
        return False

    def lets_in(self, step: int) -> bool:
        return True

    def finish_by(self, hold: Hold) -> None:
        self.finish()

    def parameters_to_give(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        self._overlap.settle()


class Stateless:
    """Of a method without state."""

    def keep(self) -> None: ...

    def drop(self) -> None: ...

    def regroup(self, rank: int, size: int) -> None: ...

    def shared_state(self) -> dict[str, Any]:
        return {}

    def staged(self) -> dict[str, Any]:
        return {}

    def stage(self, state: Mapping[str, Any]) -> None: ...

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

    def staged(self) -> dict[str, Any]:
        """What does not count yet."""
        return dict(self._fresh)

    def stage(self, state: Mapping[str, Any]) -> None:
        """Restore what `staged` returned, after `load_state_dict`."""
        self._fresh = dict(state)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept, self._fresh = dict(state), {}
