"""How far the replicas' gradients agree, measured on a sample of coordinates.

With g_w the gradients of the R replicas and E running means over exchanges,

    rho = mean over the sample of   E[(mean_w g_w)^2] / E[mean_w g_w^2]

is 1 where replicas agree and 1 / R where their gradients are independent noise: the factor by which
averaging shrinks what Adam's variance measures. Local Adam therefore steps sqrt(rho) as far along
the mean as all-reduce's Adam does.

Axes: n sampled coordinates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.gradcomp.buckets import device_of
from thinpipe.gradcomp.exchange import ExchangeKey, gather_all
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast

_SAMPLE = 4096
_DECAY = 0.9
_BUCKET = 2**32 - 2
_CODEC = Cast("bf16")


class Agreement:
    """All replicas measure the same, from the same numbers."""

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers) -> None:
        self._peers = peers
        self._parameters = [p for p in parameters if p.requires_grad]
        self._places = _spread([p.numel() for p in self._parameters])
        size = sum(places.numel() for places in self._places)
        device = device_of(self._parameters)
        self.sample_n = torch.zeros(size, device=device)
        """Gradients of this replica, as `sample` found them."""
        self._one_n, self._mean_n = (torch.zeros(size, device=device) for _ in range(2))

    @property
    def rho(self) -> float:
        """From 1 / R to 1; 1 before anything was measured."""
        seen = self._one_n > 0
        if not bool(seen.any()):
            return 1.0
        return float((self._mean_n[seen] / self._one_n[seen]).mean())

    def sample(self) -> None:
        """Take this replica's gradients, which are not summed yet."""
        parts = [
            p.grad.flatten()[places.to(p.device)].float()
            if p.grad is not None
            else torch.zeros(places.numel(), device=p.device)
            for p, places in zip(self._parameters, self._places, strict=True)
        ]
        self.sample_n = torch.cat(parts) if parts else self.sample_n

    def share(self, number: int, sample_n: Tensor) -> list[Tensor]:
        """All replicas' samples, on the communication thread.

        Raises:
            TransportError, DesyncError: a replica is gone.
        """
        return gather_all(self._peers, ExchangeKey(number, _BUCKET), sample_n, codec=_CODEC)

    def update(self, samples: Sequence[Tensor]) -> None:
        """Count an exchange."""
        found_Rn = torch.stack(list(samples))
        if bool(found_Rn.isfinite().all()):
            self._one_n.lerp_(found_Rn.square().mean(0), 1 - _DECAY)
            self._mean_n.lerp_(found_Rn.mean(0).square(), 1 - _DECAY)

    def state_dict(self) -> dict[str, Any]:
        """The running means, and the sample under way."""
        return {"sample": self.sample_n, "one": self._one_n, "mean": self._mean_n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sample_n.copy_(state["sample"])
        self._one_n.copy_(state["one"])
        self._mean_n.copy_(state["mean"])


def _spread(sizes: Sequence[int]) -> list[Tensor]:
    """Places in each of several vectors, evenly spread over all of them end to end."""
    total = sum(sizes)
    count = min(total, _SAMPLE)
    places = torch.arange(count) * total // max(count, 1)
    found, start = [], 0
    for size in sizes:
        found.append(places[(places >= start) & (places < start + size)] - start)
        start += size
    return found
