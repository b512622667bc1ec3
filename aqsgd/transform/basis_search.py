"""The sender's search for a better basis: the Karhunen-Loeve transform of what it sends.

Covariances are taken in units of the quantization step, of some tokens. The sender sends their
eigenvectors after the first step. After 2, 4, 8, ... 64 steps, and every 64 from there on, it asks
what newer ones would have saved since the basis last changed, and sends them if that is more than
they take: as many messages at least are still to come. Where eigenvectors save less than half a bit
a value, channels are sent as they are.

A basis has all D directions, unless some are to be left out: then those in which values are least,
once there are enough tokens to tell. Few tokens fill few directions, and say little of what other
tokens have in the rest: left out, that would be an error many times that of rounding. A basis that
leaves out more than twice what is least to be left out, and than rounding adds, is replaced.

Axes: N tokens, D channels and directions, K of them, M = 2 kinds of visits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.learned import CHANGE, FIRST, KINDS, Kind
from thinpipe.aqsgd.transform.proposal import Proposal
from thinpipe.aqsgd.transform.steps import MASSIVE, most_massive
from thinpipe.aqsgd.transform.tokens import median_size

_MOST_TOKENS = 256  # of a message
_ENOUGH = 8  # tokens per channel that are looked at between two searches
_MANY = 4
"""Tokens per channel, of which variances are taken as they are, and directions may be left out."""
_OFTEN = 64  # steps between two searches, at most
_ENTRY_BITS = 7.5  # what a direction takes of each channel, about
_REACH = 5  # standard deviations that a cached coefficient may reach
_DOUBT = 3
"""Savings are estimated for normal distributions. On a real model's changes .54 bits were estimated
and .17 were saved, as channels are more peaked than directions."""
_LEAST_GAIN = 0.5  # bits a value; below, channels go as they are, which needs no products
_LARGEST = 4.0  # times the median size, of tokens that covariances are taken of
_SCALE_BITS = 16  # of a token, where values are quantized without a basis
_ENERGY = 0.95  # only reported: no direction is left out by it


class Seen(NamedTuple):
    """Tokens of a message, in steps: what was coded of them, and the values."""

    kind: Kind
    sent_ND: Tensor
    value_ND: Tensor


class Spectrum(NamedTuple):
    """What a search found of what is sent.

    That is changes, if there were any. `gain` is how many bits per value a basis saves at the same
    step, against one distribution for all values with a scale per token; `dimensions` have 95 % of
    the energy.
    """

    gain: float
    dimensions: int


class SearchResult(NamedTuple):
    """Of a search: a basis that pays, and what is known of what is sent, if it was looked at."""

    proposal: Proposal | None
    spectrum: Spectrum | None


NOTHING = SearchResult(None, None)


class BasisSearch:
    """Collects covariances, and proposes bases.

    `end_step` may run on another thread; no other method may be called meanwhile.
    """

    def __init__(self, width: int, share: float) -> None:
        """Of tokens of `width` channels, of whose directions this share is sent."""
        self._width, self._kept = width, max(round(share * width), 1)
        self._steps, self._tokens_M = 0, [0.0, 0.0]
        self._sent_MDD = torch.zeros(2, width, width)
        self._value_DD = torch.zeros(width, width)
        self._count_M = [0.0, 0.0]
        self._values = 0.0

    def room(self) -> int:
        """Tokens to look at in the step after the next `end_step`, for enough at the next search.

        Before the first `end_step`: in that step.
        """
        steps = min(1 << max(0, (self._steps + 1).bit_length() - 1), _OFTEN)
        return max(_MOST_TOKENS, _ENOUGH * max(self._width, 1024) // steps)

    def end_step(
        self, seen: Sequence[Seen], tokens: int, basis: Basis, *, first: bool
    ) -> SearchResult:
        """Count a step that sent so many tokens; a better basis, if it is time to look and there is
        one, or the first.
        """
        for kind, sent_ND, value_ND in seen:
            sent_ND, value_ND = _limited(sent_ND), _limited(value_ND)
            self._sent_MDD[kind].addmm_(sent_ND.T, sent_ND)
            self._value_DD.addmm_(value_ND.T, value_ND)
            self._count_M[kind] += len(sent_ND)
            self._values += len(value_ND)
            self._tokens_M[kind] += tokens * len(sent_ND) / sum(len(one.sent_ND) for one in seen)
        self._steps += 1
        due = first or not self._steps & (self._steps - 1) or not self._steps % _OFTEN
        if not due or not sum(self._count_M):
            return NOTHING
        found = self._search(basis, first=first)
        self._sent_MDD *= 0.5  # so that bases follow a model that changes
        self._value_DD *= 0.5
        self._values *= 0.5
        self._count_M = [count * 0.5 for count in self._count_M]
        return found

    def adopted(self) -> None:
        """The last proposal is in use."""
        self._tokens_M = [0.0, 0.0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "tokens": list(self._tokens_M),
            "sent": self._sent_MDD,
            "value": self._value_DD,
            "count": list(self._count_M),
            "values": self._values,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._tokens_M = state["steps"], list(state["tokens"])
        self._sent_MDD, self._value_DD = state["sent"].clone(), state["value"].clone()
        self._count_M, self._values = list(state["count"]), state["values"]

    def _search(self, basis: Basis, *, first: bool) -> SearchResult:
        kind = CHANGE if self._count_M[CHANGE] else FIRST  # a first visit does not come again
        count = self._count_M[kind]
        sent_DD = self._sent_MDD[kind] / count
        if not bool(torch.isfinite(self._sent_MDD).all()):  # which eigh does not take
            return NOTHING
        kept = self._kept if self._values >= _MANY * self._width else self._width
        if basis.dimensions == self._kept < kept:
            return NOTHING  # too few tokens to tell which directions to leave out
        v_DK = self._directions(sent_DD, kept)
        newer_K = _expected(_variances(sent_DD, v_DK), count, self._width)
        spectrum = _spectrum(newer_K, self._width)
        saved = _bits(_variances(sent_DD, basis.matrix)) - _bits(newer_K)
        pays = saved * self._tokens_M[kind] >= _DOUBT * _ENTRY_BITS * self._width * kept
        if spectrum.gain < _LEAST_GAIN or (first and not pays):
            stays = basis.order_D is not None and not first
            return SearchResult(None if stays else self._channels(), spectrum)
        other = basis.dimensions != kept or self._leaves_out_more(basis)
        return SearchResult(self._proposal(v_DK) if pays or other else None, spectrum)

    def _directions(self, sent_DD: Tensor, kept: int) -> Tensor:
        """Those in which values are largest, turned to eigenvectors of what is sent in them.

        Massive channels stay channels: spread over directions, what is the same in all tokens would
        make many coefficients large.
        """
        square_D, few = self._value_DD.diag(), most_massive(self._width)
        usual = square_D.sort(descending=True).values[few]
        apart = torch.nonzero(square_D > MASSIVE * usual).flatten()[:few]
        others = torch.ones(self._width, dtype=torch.bool).index_fill_(0, apart, False)
        v_DK = torch.zeros(self._width, kept)
        v_DK[apart, torch.arange(len(apart))] = 1.0
        sent_DD, value_DD = (c_DD[others][:, others] for c_DD in (sent_DD, self._value_DD))
        if kept == self._width:
            v_DK[others, len(apart) :] = _eigenvectors(sent_DD)
        else:
            some_DK = _eigenvectors(value_DD)[:, : kept - len(apart)]
            turn_KK = _eigenvectors(some_DK.T @ sent_DD @ some_DK)
            v_DK[others, len(apart) :] = some_DK @ turn_KK
        return v_DK

    def _leaves_out_more(self, basis: Basis) -> bool:
        """Than it need, by as much as that is or as rounding adds."""
        if basis.dimensions == self._width:
            return False
        value_DD = self._value_DD / self._values
        least = float(torch.linalg.eigvalsh(value_DD)[: -basis.dimensions].sum())
        kept = float(((value_DD @ basis.inverse) * basis.matrix).sum())
        return float(value_DD.trace()) - kept - least > max(least, self._width / 12)

    def _proposal(self, v_DK: Tensor) -> Proposal:
        square_K, order_K = _variances(self._value_DD / self._values, v_DK).sort(descending=True)
        v_DK = v_DK[:, order_K]
        shift_K = _shifts(_expected(square_K, self._values, self._width))
        return Proposal(Basis.nearest(v_DK, shift_K), self._models(v_DK))

    def _channels(self) -> Proposal:
        """The channels as they are, those that vary most first."""
        square_D, order_D = (self._value_DD.diag() / self._values).sort(descending=True)
        basis = Basis.of_channels(order_D, _shifts(square_D))
        return Proposal(basis, self._models(basis.matrix))

    def _models(self, v_DK: Tensor) -> Tensor:
        """Where the models of the directions start; kinds not seen yet take the other's."""
        found = []
        for kind in KINDS:
            seen = kind if self._count_M[kind] else (CHANGE if kind == FIRST else FIRST)
            variance_K = self._expected(seen, v_DK)
            # 20 is mean 1 (logistic.py); of Laplace's distribution the mean is sqrt(variance / 2)
            model_K = 20 + 4 * ((variance_K / 2).clamp_min(2.0**-12).log2() / 2)
            found.append(model_K.round().clamp(0, logistic.MODELS - 1).long())
        return torch.stack(found)

    def _expected(self, kind: Kind, v_DK: Tensor) -> Tensor:
        count = self._count_M[kind]
        return _expected(_variances(self._sent_MDD[kind] / count, v_DK), count, self._width)


def sampled(value_NK: Tensor) -> Tensor:
    """Numbers of the tokens of a message that are looked at; zeros only if there are no others."""
    alive_N = torch.nonzero(value_NK.any(1)).flatten()
    some_N = alive_N if len(alive_N) else torch.arange(len(value_NK))
    return some_N[:: max(1, math.ceil(len(some_N) / _MOST_TOKENS))]


def _limited(x_ND: Tensor) -> Tensor:
    """Tokens of usual size as they are, and massive ones smaller: there are few, and alike."""
    size_N1 = x_ND.abs().mean(1, keepdim=True)
    return x_ND * (_LARGEST * median_size(x_ND) / size_N1.clamp_min(1e-30)).clamp_max(1.0)


def _shifts(square_K: Tensor) -> Tensor:
    """Low bits (uint8) that caches drop, so that almost all coefficients fit a byte."""
    reach_K = (_REACH * square_K.double().sqrt()).clamp_min(1.0)
    return (reach_K.log2().ceil() - 7).clamp(0, 20).to(torch.uint8)


def _spectrum(energy_K: Tensor, width: int) -> Spectrum:
    """From what dimensions have of a token of so many channels, in squared steps."""
    energy_K = energy_K.sort(descending=True).values
    alike = width * _bits(energy_K.sum()[None] / width) + _SCALE_BITS
    share_K = energy_K.cumsum(0) / energy_K.sum().clamp_min(1e-30)
    gain = (alike - _bits(energy_K)) / width
    return Spectrum(gain, min(int((share_K < _ENERGY).sum()) + 1, len(energy_K)))


def _expected(variance_K: Tensor, count: float, width: int) -> Tensor:
    """What these variances, in the directions that `count` tokens vary in most, are for others.

    Where these are few, some of the mean is mixed in: as much as makes the expected square error of
    the covariance least (Ledoit and Wolf 2004) if all tokens are of one length.
    """
    if count >= _MANY * width:
        return variance_K
    mean, square = variance_K.mean(), variance_K.square().sum()
    uneven = (square - variance_K.sum() * mean).clamp_min(1e-30)
    share = ((variance_K.sum().square() - square) / (count * uneven)).clamp(0, 1)
    return variance_K + share * (mean - variance_K)


def _eigenvectors(c_DD: Tensor) -> Tensor:
    """The widest first."""
    vectors_DD: Tensor = torch.linalg.eigh(c_DD)[1]
    return vectors_DD.flip(1)


def _variances(c_DD: Tensor, v_DK: Tensor) -> Tensor:
    return ((c_DD @ v_DK) * v_DK).sum(0).clamp_min(0)


def _bits(variance_K: Tensor) -> float:
    """What a token's coefficients take, about; variances in squared steps."""
    return float(torch.log2(1 + 12 * variance_K).sum()) / 2  # rounding adds a variance of 1 / 12
