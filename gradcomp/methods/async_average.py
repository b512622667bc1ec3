"""Asynchronous averaging: replicas train on while the mean of where they were is on its way.

Gan et al., "BAGUA", VLDB 2022 (asynchronous model averaging). Every `interval` steps

    a   = mean of the x_w, as they are now         during the next `overlap` steps of training
    x_w += a - (x_w as it was)                     what was learnt meanwhile is kept

BAGUA exchanges every 500 ms from a thread that locks the model during forward and backward and asks
with an all-reduce of its own whether to go on, and its users report hangs at exit and in between.
Here exchanges are counted in steps, so replicas agree on them without a word, a run can be repeated
bit for bit, and nothing holds a lock: the training thread applies what has arrived.
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Stateless
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, sum_sharded
from thinpipe.gradcomp.local_steps import LocalSteps, TurnsConfig
from thinpipe.pipeline.comm.transport import Peers

REPLICAS_EQUAL = False
GOES_ON: dict[str, object] = {}


class Config(TurnsConfig):
    """An exchange every `interval` steps has the time of `overlap` of them."""

    interval: int = Field(8, ge=1)
    overlap: int = Field(7, ge=0)


class Mean(Stateless):
    """The outer step: the global model becomes the mean. It keeps no state."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def update(self, index: int, distance_N: Tensor, key: ExchangeKey) -> Tensor:
        return sum_sharded(self._peers, key, distance_N, codec=EXACT).div_(self._peers.size)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> LocalSteps:
    return LocalSteps(parameters, peers, config, Mean(peers), mix=None)
