"""How much to exchange so that it just overlaps with the computation.

All replicas choose from the same numbers, so they choose alike: the shortest time any of them has
for an exchange, and the lowest rate at which any of them has made one.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.gradcomp.exchange import ExchangeKey, gather_all
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast

_LOG = logging.getLogger(__name__)
_BUCKET = 2**32 - 1
_SMOOTHING = 0.3
_FILL = 0.8
"""Of the slot: the rest is for messages of the pipeline and for steps that are shorter."""


@dataclass(frozen=True)
class Choice:
    """How much of the parameters an exchange holds; methods add how they travel."""

    subset: float


class Budget:
    """Measures the slot and the exchange on this replica, and chooses together with the others."""

    def __init__(
        self, peers: Peers, start: Choice, numel: int, choices: Mapping[Choice, float]
    ) -> None:
        """`numel` parameters are exchanged; `start` holds until all replicas have measured.

        `choices` go from least to most, with the bits that a parameter costs each way.
        """
        self.choice, self._choices = start, choices
        self._peers, self._numel = peers, numel
        self._slot_s = self._rate_bps = 0.0

    def slot(self, seconds: float) -> None:
        """Note how long an exchange had before it was waited for."""
        self._slot_s = _smoothed(self._slot_s, seconds)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, an exchange is made: how long it takes counts, codec and all."""
        before, begin_s = self._peers.bytes_sent, time.perf_counter()
        yield
        nbytes, seconds = self._peers.bytes_sent - before, time.perf_counter() - begin_s
        if nbytes:
            self._rate_bps = _smoothed(self._rate_bps, 8 * nbytes / seconds)

    def agree(self, number: int) -> None:
        """Choose for exchange `number` and those that follow; all replicas call it alike.

        Raises:
            TransportError, DesyncError: a replica is gone.
        """
        mine = torch.tensor([self._slot_s, self._rate_bps])
        key, exact = ExchangeKey(number, _BUCKET), Cast("fp32")
        measured = gather_all(self._peers, key, mine, codec=exact)
        chosen = choose(self._choices, measured, numel=self._numel) or self.choice
        if chosen != self.choice:
            _LOG.info("exchange %d: %s instead of %s", number, chosen, self.choice)
            self.choice = chosen


def choose(
    choices: Mapping[Choice, float], measured: Sequence[Tensor], *, numel: int
) -> Choice | None:
    """The most that fits, or the least of all; None before all replicas have measured.

    `measured` holds (seconds of the slot, bit/s of exchanges) of every replica.
    """
    slot_s, rate_bps = torch.stack(list(measured)).min(0).values.tolist()
    if not slot_s or not rate_bps:
        return None
    values = 2 * (len(measured) - 1) / len(measured) * numel
    fitting = [c for c, cost in choices.items() if cost * values / rate_bps <= _FILL * slot_s]
    return fitting[-1] if fitting else next(iter(choices))


def _smoothed(old: float, new: float) -> float:
    return (1 - _SMOOTHING) * old + _SMOOTHING * new if old else new
