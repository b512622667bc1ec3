"""SparseLoCo: DiLoCo whose outer step is sparse, 2-bit, and has error feedback for momentum.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.

    E_w = decay E_w + (g - x_w)                   what this replica still owes the global model
    c_w = the largest of each tile of E_w, 2 bits
    E_w -= c_w
    g  -= lr mean_w c_w

The mean divides by the number of replicas, as published; the authors' code divides by how many sent
a value at that place.

Axes: N values of a bucket.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Staged
from thinpipe.gradcomp.exchange import ExchangeKey, gather_bytes
from thinpipe.gradcomp.local_steps import LocalSteps, LocalStepsConfig
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.tile_topk import TileTopK

REPLICAS_EQUAL = False
GOES_ON: dict[str, object] = {}


class Config(LocalStepsConfig):
    """`kept` of every 4,096 values are sent. The published settings are the defaults."""

    kept: int = 64
    decay: float = Field(0.95, ge=0, le=1)
    outer_lr: float = Field(1.0, gt=0)

    @property
    def codec(self) -> TileTopK:
        return TileTopK(self.kept, 2)


class SparseLoCo(Staged):
    """The outer step: equal on all replicas, as all add the same messages in the same order.

    It keeps what is owed.
    """

    def __init__(self, peers: Peers, config: Config) -> None:
        super().__init__()
        self._peers, self._config, self._codec = peers, config, config.codec

    def update(self, index: int, distance_N: Tensor, key: ExchangeKey) -> Tensor:
        distance_N, owed_N = distance_N.float(), self.get(str(index), distance_N.device)
        owed_N = torch.zeros_like(distance_N) if owed_N is None else owed_N
        target_N = (self._config.decay * owed_N).add_(distance_N)
        seen_N = torch.empty_like(target_N)
        sum_N, count_N = torch.zeros_like(target_N), torch.zeros_like(target_N)
        for payload in gather_bytes(self._peers, key, target_N, seen_N, codec=self._codec):
            self._codec.add_to(payload, sum_N, count_N)
        self.set(str(index), target_N - seen_N)
        return self._config.outer_lr * sum_N.div_(self._peers.size)

    def shared_state(self) -> dict[str, Any]:
        """Nothing: what is owed is each replica's own."""
        return {}


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> LocalSteps:
    return LocalSteps(parameters, peers, config, SparseLoCo(peers, config), mix=config.mix)
