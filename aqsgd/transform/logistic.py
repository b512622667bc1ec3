"""Static models of quantized coefficients: logistic distributions on a geometric grid of scales.

Under model j the mean magnitude before rounding is 2^((j - 20) / 4) steps. A coefficient of a model
with shift h is coded as q >> h, clamped to 32 symbols, then its h low bits, which are almost
uniform where h > 0. Both ends of a link need the same integers, whatever computes them: tables come
from decimal arithmetic. (Within a token, coefficients are less peaked than Laplace's distribution:
this one takes 2 % fewer bits.)

Axes: J models, S symbols, F frequency tables.
"""

import functools
import itertools
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from thinpipe.pipeline.wire.coding.rans import Tables
from thinpipe.pipeline.wire.kernels.coefficients import DIGIT_BITS, MIDDLE, SYMBOLS

MODELS = 61  # means from 2^-5 to 2^10 steps; what is far above goes as it is, in 32 bits
LAST_UNSHIFTED = 25  # a mean of 2.4 steps: one value in 3,000 is outside its 32 symbols
UNIFORM = LAST_UNSHIFTED + 5
"""Table of digits of one bit; those of more follow."""
MAGNITUDE_BITS = 12  # of the fraction: both ends compare whole numbers
_UNIT = 20  # the model of mean 1
_SUM = 1 << 12  # the slots of rANS
_COARSE = 8  # from here on rounding moves the mean by less than .03 %, and sums get long
_NEGLIGIBLE = Decimal(2) ** -30


@functools.cache
def tables() -> Tables:
    """Frequencies: of rounded coefficients, of shifted ones, and uniform ones of 1 to 5 bits."""
    rounded = [_frequencies(_rounded(_scale(j))) for j in range(LAST_UNSHIFTED + 1)]
    shifted = [_frequencies(_floored(_scale(j))) for j in range(LAST_UNSHIFTED - 3, UNIFORM - 4)]
    uniform = [_uniform(bits) for bits in range(1, DIGIT_BITS + 1)]
    return Tables(torch.tensor(rounded + shifted + uniform, dtype=torch.int32))


@functools.cache
def shifts() -> Tensor:
    """Low bits of each model (int64)."""
    return torch.tensor([max(0, -(-(j - LAST_UNSHIFTED) // 4)) for j in range(MODELS)])


@functools.cache
def table_ids() -> Tensor:
    """The frequency table of each model (uint8)."""
    found = [j if j <= LAST_UNSHIFTED else UNIFORM - 4 + (j - 26) % 4 for j in range(MODELS)]
    return torch.tensor(found, dtype=torch.uint8)


@functools.cache
def magnitudes() -> Tensor:
    """Mean |q| under each model, in 1 / 4096 (int64)."""
    return torch.tensor([_magnitude(j) for j in range(MODELS)])


def _magnitude(model: int) -> int:
    with localcontext() as context:
        context.prec = 30
        scale, mean, k = _scale(model), Decimal(0), 0
        if scale > _COARSE:  # rounding changes nothing
            mean = scale * 2 * Decimal(2).ln()
        else:
            while (tail := _above(Decimal(2 * k + 1) / 2, scale)) > _NEGLIGIBLE:
                mean, k = mean + 2 * tail, k + 1
        return int(mean * (1 << MAGNITUDE_BITS) + Decimal("0.5"))


def _scale(model: int) -> Decimal:
    """In steps; the mean magnitude is 2 ln 2 times as much."""
    ln2 = Decimal(2).ln()
    return (Decimal(model - _UNIT) / 4 * ln2).exp() / (2 * ln2)


def _above(edge: Decimal, scale: Decimal) -> Decimal:
    return 1 / (1 + (edge / scale).exp())


def _rounded(scale: Decimal) -> list[Decimal]:
    """Probabilities of q = -16 and below, -15, ..., 15 and above, rounded to nearest."""
    return _between([Decimal(2 * k - 1) / 2 for k in range(-MIDDLE + 1, MIDDLE)], scale)


def _floored(scale: Decimal) -> list[Decimal]:
    """The same, rounded down; `scale` is in units of 2^h steps."""
    return _between([Decimal(k) for k in range(-MIDDLE + 1, MIDDLE)], scale)


def _between(edges: list[Decimal], scale: Decimal) -> list[Decimal]:
    above = [Decimal(1), *(_above(edge, scale) for edge in edges), Decimal(0)]
    return [a - b for a, b in itertools.pairwise(above)]


def _frequencies(probabilities: list[Decimal]) -> list[int]:
    """Whole numbers that sum to 4096, each at least 1; the most probable one takes the rest."""
    found = [1 + int(p * (_SUM - SYMBOLS)) for p in probabilities]
    found[found.index(max(found))] += _SUM - sum(found)  # the first of equals, on any machine
    return found


def _uniform(bits: int) -> list[int]:
    """2^bits digits; what is not one of them keeps the least there is."""
    digits, rest = 1 << bits, SYMBOLS - (1 << bits)
    each = (_SUM - rest) // digits
    return [_SUM - rest - each * (digits - 1), *[each] * (digits - 1), *[1] * rest]
