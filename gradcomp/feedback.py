"""Error feedback: what a compressor left out of a vector is added to the next one.

Seide et al. 2014; Stich et al. 2018. With it, what was sent plus what is remembered equals the sum
of all that was to be sent.

Axes: N values.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.codec import Codec


class Residuals:
    """One residual (fp32) per name. What a step leaves counts once the step is kept."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._fresh: dict[str, Tensor] = {}

    def add_to(self, name: str, x_N: Tensor) -> Tensor:
        """Add to `x_N`, in place, what was left out before."""
        if name in self._kept:
            x_N += self._kept[name].to(x_N.device)  # restored ones are in host memory
        return x_N

    def leave(self, name: str, rest_N: Tensor) -> None:
        """Remember what this step left out; takes the tensor over."""
        self._fresh[name] = rest_N

    def keep(self) -> None:
        """The step counts. Without this call the next step overwrites what it left."""
        self._kept.update(self._fresh)
        self._fresh.clear()

    def state_dict(self) -> dict[str, Any]:
        """The residuals."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._kept, self._fresh = dict(state), {}


class FeedbackReducer:
    """What reducers share whose only memory is residuals; each adds `reduce`."""

    def __init__(self, peers: Peers, codec: Codec) -> None:
        self._peers, self._codec, self._residuals = peers, codec, Residuals()

    def keep(self) -> None:
        """Residuals count."""
        self._residuals.keep()

    def state_dict(self) -> dict[str, Any]:
        """The residuals."""
        return self._residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._residuals.load_state_dict(state)
