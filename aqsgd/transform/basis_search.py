"""The sender's search for a better basis: the Karhunen-Loeve transform of what it sends.

Covariances are taken in units of the quantization step, of some tokens. The sender sends their
eigenvectors after the first step. After 2, 4, 8, ... steps it asks what newer ones would have saved
since the basis last changed, and sends them if that is more than they take: as many messages at
least are still to come. It also does when a basis leaves out too much. Where eigenvectors save less
than half a bit a value, channels are sent as they are.

Axes: N tokens, D channels, K dimensions, M = 2 kinds of visits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.learned import CHANGE, FIRST, KINDS, Kind, Proposal

_MOST_TOKENS = 256
"""Of a message."""
_ENOUGH = 8
"""Tokens per channel that are looked at between two searches."""
_ENTRY_BITS = 16
_REACH = 5
"""Standard deviations that a remembered coefficient may reach."""
_LEFT_OUT = 0.1
"""Of a token, in units of what rounding adds (width / 12 squared steps), when a basis is found."""
_MOST_LEFT_OUT = 0.3
"""When more is left out, a new basis is needed."""
_TOKENS_BETWEEN = 32
"""Tokens per channel before that: then bases take at most 0.5 bits a value."""
_LEAST_GAIN = 0.5
_SCALE_BITS = 16
"""Of a token, where values are quantized without a basis (`rate`)."""
_ENERGY = 0.95


class Seen(NamedTuple):
    """Tokens of a message, in steps: what was coded of them, and the values."""

    kind: Kind
    sent_ND: Tensor
    value_ND: Tensor


class Spectrum(NamedTuple):
    """What a search found of what is sent.

    That is changes, if there were any. `gain` is how many bits per value a basis saves at the same
    step, against one distribution for all values with a scale per token (`rate`); `dimensions` have
    95 % of the energy.
    """

    gain: float
    dimensions: int


class Found(NamedTuple):
    """Of a search: a basis that pays, and what is known of what is sent, if it was looked at."""

    proposal: Proposal | None
    spectrum: Spectrum | None


NOTHING = Found(None, None)


class BasisSearch:
    """Collects covariances, and proposes bases.

    `end_step` may run beside anything else; what else there is may not run beside it.
    """

    def __init__(self, width: int) -> None:
        """Of tokens of `width` channels."""
        self._width = width
        self._steps, self._tokens = 0, 0
        self._sent_MDD = torch.zeros(2, width, width)
        self._value_DD = torch.zeros(width, width)
        self._count_M = [0.0, 0.0]
        self._values = 0.0

    def room(self) -> int:
        """Tokens to look at in the step after the next `end_step`, for enough at the next search.

        Before the first `end_step`: in that step.
        """
        steps = 1 << max(0, (self._steps + 1).bit_length() - 1)
        return max(_MOST_TOKENS, _ENOUGH * max(self._width, 1024) // steps)

    def end_step(self, seen: Sequence[Seen], tokens: int, basis: Basis, *, first: bool) -> Found:
        """Count a step that sent so many tokens; a better basis, if it is time to look and there is
        one, or the first.
        """
        left_out = looked_at = 0.0
        for kind, sent_ND, value_ND in seen:
            left_out += float(sent_ND.square().sum() - basis.project(sent_ND).square().sum())
            looked_at += len(sent_ND)
            self._sent_MDD[kind].addmm_(sent_ND.T, sent_ND)
            self._value_DD.addmm_(value_ND.T, value_ND)
            self._count_M[kind] += len(sent_ND)
            self._values += len(value_ND)
        self._tokens += tokens
        self._steps += 1
        too_much = left_out > _MOST_LEFT_OUT * looked_at * self._width / 12
        needed = first or (too_much and self._tokens >= _TOKENS_BETWEEN * self._width)
        due = needed or not self._steps & (self._steps - 1)
        if not due or not sum(self._count_M):
            return NOTHING
        found = self._search(basis, needed=needed)
        self._sent_MDD *= 0.5
        self._value_DD *= 0.5
        self._values *= 0.5
        self._count_M = [count * 0.5 for count in self._count_M]
        return found

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

    def _search(self, basis: Basis, *, needed: bool) -> Found:
        sent_DD = self._sent_MDD.sum(0) / sum(self._count_M)
        if not bool(torch.isfinite(sent_DD).all()):
            return NOTHING
        v_DD = torch.linalg.eigh(sent_DD)[1].flip(1)
        kind = CHANGE if self._count_M[CHANGE] else FIRST
        spectrum = _spectrum(_variances(self._sent_MDD[kind] / self._count_M[kind], v_DD))
        if spectrum.gain < _LEAST_GAIN:
            stays = basis.order_D is not None and not needed
            return Found(None if stays else self._channels(), spectrum)
        saved = _bits(_variances(sent_DD, basis.matrix)) - _bits(_variances(sent_DD, v_DD))
        pays = saved * self._tokens >= _ENTRY_BITS * self._width**2
        return Found(self._proposal(v_DD) if needed or pays else None, spectrum)

    def _proposal(self, v_DD: Tensor) -> Proposal:
        """The widest directions first; the narrowest are left out, as far as that is allowed."""
        square_D, order = _variances(self._value_DD / self._values, v_DD).sort(descending=True)
        from_here_D = square_D.flip(0).cumsum(0).flip(0)
        kept = max(int((from_here_D > _LEFT_OUT * self._width / 12).sum()), 1)
        v_DK = v_DD[:, order[:kept]]
        return Proposal(Basis.nearest(v_DK, _wide(square_D[:kept])), self._models(v_DK))

    def _channels(self) -> Proposal:
        """The channels as they are, those that vary most first."""
        square_D, order_D = (self._value_DD.diag() / self._values).sort(descending=True)
        basis = Basis.of_channels(order_D, _wide(square_D))
        return Proposal(basis, self._models(basis.matrix))

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


def _wide(square_K: Tensor) -> int:
    """How many dimensions are remembered in two bytes, so that as few as can be are clamped."""
    reach_K = _REACH * square_K.sqrt()
    narrow = int((reach_K < 2**3).sum())
    return min(int((reach_K > 2**7).sum()), narrow // 2, len(square_K) // 3)


def _spectrum(energy_D: Tensor) -> Spectrum:
    """From what dimensions have of a token, in squared steps."""
    width, energy_D = len(energy_D), energy_D.sort(descending=True).values
    alike = width * _bits(energy_D.mean()[None]) + _SCALE_BITS
    share_D = energy_D.cumsum(0) / energy_D.sum().clamp_min(1e-30)
    return Spectrum(
        (alike - _bits(energy_D)) / width, min(int((share_D < _ENERGY).sum()) + 1, width)
    )


def _variances(c_DD: Tensor, v_DK: Tensor) -> Tensor:
    return ((c_DD @ v_DK) * v_DK).sum(0).clamp_min(0)


def _bits(variance_K: Tensor) -> float:
    """What a token's coefficients take, about; variances in squared steps."""
    return float(torch.log2(1 + 12 * variance_K).sum()) / 2
