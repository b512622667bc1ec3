"""DiLoCo: replicas train alone for `interval` steps; an outer optimizer applies their mean move.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; with
`fragments`, `overlap` and `mix` its streaming form (Douillard et al. 2025), whose fragments take
turns and travel in parallel with training, at 4 bits.

    G = mean_w (g - x_w)
    v = momentum v + G
    g -= lr (G + momentum v)      Nesterov

Axes: N values of a bucket.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Staged
from thinpipe.gradcomp.exchange import ExchangeKey, sum_sharded
from thinpipe.gradcomp.local_steps import LocalSteps, LocalStepsConfig
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = False
GOES_ON: dict[str, object] = {}


class Config(LocalStepsConfig):
    """The outer optimizer is SGD with Nesterov momentum, as published.

    Moves travel at `bits` per value (32: exactly).
    """

    outer_lr: float = Field(0.7, gt=0)
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    bits: int = Field(32, ge=2, le=32)

    @property
    def codec(self) -> Codec:
        if self.bits == 32:
            return Cast("fp32")
        return Cast("bf16") if self.bits == 16 else Uniform(self.bits, self.group)


class DiLoCo(Staged):
    """The outer step: equal on all replicas, as all apply the same mean. It keeps momenta."""

    def __init__(self, peers: Peers, config: Config) -> None:
        super().__init__()
        self._peers, self._config, self._codec = peers, config, config.codec

    def update(self, index: int, distance_N: Tensor, key: ExchangeKey) -> Tensor:
        mean_N = sum_sharded(self._peers, key, distance_N, codec=self._codec) / self._peers.size
        momentum, old_N = self._config.outer_momentum, self.get(str(index), mean_N.device)
        new_N = mean_N.clone() if old_N is None else mean_N + momentum * old_N
        self.set(str(index), new_N)
        return self._config.outer_lr * torch.add(mean_N, new_N, alpha=momentum)

    def shared_state(self) -> dict[str, Any]:
        return self.state_dict()


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> LocalSteps:
    return LocalSteps(parameters, peers, config, DiLoCo(peers, config), mix=config.mix)
