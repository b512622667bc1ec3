"""The sender's search for a better basis: the Karhunen-Loeve transform of what it sends.

Covariances are taken in units of the quantization step, of some tokens of every message. The
sender sends their eigenvectors after the first step. After 2, 4, 8, ... steps it asks what newer
ones would have saved since the basis last changed, and sends them if that is more than they take:
as many messages at least are still to come. It also does when a basis leaves out too much.

Axes: N tokens, D channels, K dimensions, M = 2 kinds of visits.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.learned import CHANGE, FIRST, KINDS, Kind, Proposal

_MOST_TOKENS = 256
_ENTRY_BITS = 16
_REACH = 5
"""Standard deviations that a remembered coefficient may reach."""
_LEFT_OUT = 0.1
"""Of a token, in units of what rounding adds (width / 12 squared steps), when a basis is found."""
_MOST_LEFT_OUT = 0.3
"""When more is left out, a new basis is needed."""
_TOKENS_BETWEEN = 32
"""Tokens per channel before that: then bases take at most 0.5 bits a value."""


class _Seen(NamedTuple):
    """Tokens of a message, in steps; there were `of` of them."""

    kind: Kind
    sent_ND: Tensor
    value_ND: Tensor
    of: int


class BasisSearch:
    """Collects covariances, and proposes bases."""

    def __init__(self, width: int) -> None:
        """Of tokens of `width` channels."""
        self._width = width
        self._steps, self._tokens = 0, 0
        self._sent_MDD = torch.zeros(2, width, width)
        self._value_DD = torch.zeros(width, width)
        self._count_M = [0.0, 0.0]
        self._values = 0.0
        self._seen: list[_Seen] = []

    def see(self, kind: Kind, sent_ND: Tensor, value_ND: Tensor, *, step: float, of: int) -> None:
        """Take in some `of` so many tokens that were sent: what was coded, and the values."""
        self._seen.append(_Seen(kind, sent_ND / step, value_ND / step, of))

    def end_step(self, basis: Basis, *, first: bool) -> Proposal | None:
        """Count a step; a better basis, if it is time to look and there is one, or the first."""
        left_out = tokens = 0.0
        for kind, sent_ND, value_ND, of in self._seen:
            left_out += float(sent_ND.square().sum() - basis.project(sent_ND).square().sum())
            tokens += len(sent_ND)
            self._sent_MDD[kind] += sent_ND.T @ sent_ND
            self._value_DD += value_ND.T @ value_ND
            self._count_M[kind] += len(sent_ND)
            self._values += len(value_ND)
            self._tokens += of
        self._seen = []
        self._steps += 1
        too_much = left_out > _MOST_LEFT_OUT * tokens * self._width / 12
        needed = first or (too_much and self._tokens >= _TOKENS_BETWEEN * self._width)
        due = needed or not self._steps & (self._steps - 1)
        if not due or not sum(self._count_M):
            return None
        found = self._search(basis, needed=needed)
        self._sent_MDD *= 0.5
        self._value_DD *= 0.5
        self._values *= 0.5
        self._count_M = [count * 0.5 for count in self._count_M]
        return found

    def discard(self) -> None:
        """Forget a step."""
        self._seen = []

    def adopted(self) -> None:
        """The last proposal is in use."""
        self._tokens = 0

    def state_dict(self) -> dict[str, Any]:
        """What was collected."""
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "sent": self._sent_MDD,
            "value": self._value_DD,
            "count": list(self._count_M),
            "values": self._values,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._steps, self._tokens = state["steps"], state["tokens"]
        self._sent_MDD, self._value_DD = state["sent"].clone(), state["value"].clone()
        self._count_M, self._values = list(state["count"]), state["values"]

    def _search(self, basis: Basis, *, needed: bool) -> Proposal | None:
        sent_DD = self._sent_MDD.sum(0) / sum(self._count_M)
        if not bool(torch.isfinite(sent_DD).all()):
            return None
        v_DD = torch.linalg.eigh(sent_DD.double())[1].flip(1).float()
        saved = _bits(_variances(sent_DD, basis.matrix)) - _bits(_variances(sent_DD, v_DD))
        if not needed and saved * self._tokens < _ENTRY_BITS * self._width**2:
            return None
        return self._proposal(v_DD)

    def _proposal(self, v_DD: Tensor) -> Proposal:
        """The widest directions first; the narrowest are left out, as far as that is allowed."""
        square_D, order = _variances(self._value_DD / self._values, v_DD).sort(descending=True)
        from_here_D = square_D.flip(0).cumsum(0).flip(0)
        kept = max(int((from_here_D > _LEFT_OUT * self._width / 12).sum()), 1)
        v_DK, reach_K = v_DD[:, order[:kept]], _REACH * square_D[:kept].sqrt()
        narrow = int((reach_K < 2**3).sum())
        wide = min(int((reach_K > 2**7).sum()), narrow // 2, kept // 3)
        return Proposal(Basis.nearest(v_DK, wide), self._models(v_DK))

    def _models(self, v_DK: Tensor) -> Tensor:
        """Where the models of the dimensions start; kinds not seen yet take the other's."""
        found = []
        for kind in KINDS:
            seen = kind if self._count_M[kind] else (CHANGE if kind == FIRST else FIRST)
            variance_K = _variances(self._sent_MDD[seen] / self._count_M[seen], v_DK)
            model_K = 20 + 4 * ((variance_K / 2).clamp_min(2.0**-12).log2() / 2)
            found.append(model_K.round().clamp(0, logistic.MODELS - 1).long())
        return torch.stack(found)


def sampled(tokens: int) -> slice:
    """Which tokens of a message are looked at."""
    return slice(None, None, max(1, math.ceil(tokens / _MOST_TOKENS)))


def _variances(c_DD: Tensor, v_DK: Tensor) -> Tensor:
    return ((c_DD @ v_DK) * v_DK).sum(0).clamp_min(0)


def _bits(variance_K: Tensor) -> float:
    """What a token's coefficients take, about; variances in squared steps."""
    return float(torch.log2(1 + 12 * variance_K).sum()) / 2
