"""A linear transform of tokens, sent from one end of a cut to the other, in whole numbers.

It may also be none: the channels themselves, in an order.

A basis has entries in 1 / 16384, a step is 2^(i / 4) for a whole number i, and coefficients are
whole numbers of steps. Projecting and restoring are floating-point products, which machines may
round differently; what both ends must agree on (coefficients under another basis or step) is
computed in whole numbers: products of integers in float64, exact below 2^53 in any order.

Entries are rounded so far, to send few bits, that directions are orthogonal to a hundredth only.
Projecting makes up for that, turning coefficients into another basis to the square of it.

Axes: N tokens, D channels, K dimensions.
"""

import functools
import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from thinpipe.pipeline.wire.header import crc32

_BYTE_BITS, _EXACT_LIMIT = 7, 2**23 - 1  # magnitudes of an int8 and of three bytes; a sign on top
_POINT = 14  # with one bit more 1.0 would not fit an int16
ONE = 1 << _POINT


@dataclass(frozen=True)
class Basis:
    """K directions in D channels, as columns (int16, in 1 / 16384), the widest first.

    Coefficients are cached in a byte each, without the `shift_K` (uint8) low bits of a dimension,
    and without as many more as a token's largest one needs. The first dimensions, in which massive
    activations are, take three bytes: they lose nothing below 2^23. With an `order` the directions
    are the channels of these numbers, and no product is needed.
    """

    entry_DK: Tensor
    shift_K: Tensor
    order_D: Tensor | None = None

    @staticmethod
    def identity(width: int) -> "Basis":
        return Basis.of_channels(torch.arange(width), torch.zeros(width, dtype=torch.uint8))

    @staticmethod
    def of_channels(order_D: Tensor, shift_D: Tensor) -> "Basis":
        width = len(order_D)
        entry_DK = torch.zeros(width, width, dtype=torch.int16)
        entry_DK[order_D, torch.arange(width)] = ONE
        return Basis(entry_DK, shift_D, order_D)

    @staticmethod
    def nearest(v_DK: Tensor, shift_K: Tensor) -> "Basis":
        unit = entry_unit(len(v_DK))
        entry_DK = (v_DK * (ONE / unit)).round().clamp(-ONE // unit, ONE // unit) * unit
        return Basis(entry_DK.to(torch.int16).contiguous(), shift_K)

    @property
    def dimensions(self) -> int:
        return self.entry_DK.shape[1]

    @functools.cached_property
    def matrix(self) -> Tensor:
        """As floats, on the CPU."""
        return self.entry_DK.float() / ONE

    @functools.cached_property
    def inverse(self) -> Tensor:
        """What coefficients that `matrix` restores are found by; floats, on the CPU."""
        v_DK = self.matrix.double()
        inverse_DK: Tensor = torch.linalg.solve(v_DK.T @ v_DK, v_DK.T).T
        return inverse_DK.float().contiguous()

    @functools.cached_property
    def checksum(self) -> int:
        return crc32(self.shift_K, crc32(self.entry_DK))

    def project(self, x_ND: Tensor) -> Tensor:
        """Coefficients (fp32) of tokens, on their device."""
        if self.order_D is not None:
            return x_ND.float()[:, self.order_D]
        return _product(x_ND.float(), self.inverse.to(x_ND.device))

    def restore(self, y_NK: Tensor) -> Tensor:
        """Tokens (fp32) from their coefficients."""
        if self.order_D is not None:
            return torch.empty_like(y_NK).index_copy_(1, self.order_D.to(y_NK.device), y_NK)
        return _product(y_NK, self.matrix.to(y_NK.device).T)

    def remembered(self, q_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients (int32) in bytes (uint8), and how many more low bits each token drops.

        However large they are, they come back to the nearest number that so many bits allow.
        """
        first = exact_dimensions(self.dimensions)
        exact_NE, q_NK, shift_K = q_NK[:, :first], q_NK[:, first:], self.shift_K[first:].int()
        peak_N = (q_NK.abs() >> shift_K).amax(1) if q_NK.shape[1] else q_NK.new_zeros(len(q_NK))
        more_N = (torch.frexp(peak_N.double())[1] - _BYTE_BITS).clamp_min_(0).int()  # bit lengths
        shift_NK = shift_K + more_N[:, None]
        limit = (1 << _BYTE_BITS) - 1
        # half a unit is added to round to nearest, and nothing where no bit is dropped
        small_NK = ((q_NK + ((1 << shift_NK) >> 1)) >> shift_NK).clamp_(-limit, limit)
        exact_NE = exact_NE.clamp(-_EXACT_LIMIT, _EXACT_LIMIT)
        parts = [small_NK, exact_NE, exact_NE >> 8, exact_NE >> 16]
        return (torch.cat(parts, 1) & 255).to(torch.uint8), more_N  # two's complement

    def recalled(self, stored_NW: Tensor, more_N: Tensor) -> Tensor:
        first = exact_dimensions(self.dimensions)
        rest = self.dimensions - first
        small_NK = stored_NW[:, :rest].view(torch.int8).int()
        low_NE, middle_NE, high_NE = stored_NW[:, rest:].chunk(3, 1)
        exact_NE = low_NE.int() | middle_NE.int() << 8 | high_NE.view(torch.int8).int() << 16
        shift_NK = self.shift_K[first:].int() + more_N[:, None]
        return torch.cat([exact_NE, small_NK << shift_NK], 1)

    def turn_from(self, other: "Basis") -> Tensor:
        """What turns coefficients under another basis into those in this one (int32 [K, L])."""
        entry_KD = self.entry_DK.double().T
        turn_KL = _rounded(entry_KD @ other.entry_DK.double())
        gram_KK = _rounded(entry_KD @ entry_KD.T)  # 1 where directions are orthonormal
        # a step of Newton's method: (2 - G) T is G^-1 T, to the square of what G lacks of 1
        return (2 * turn_KL - _rounded(gram_KK @ turn_KL)).int()


def exact_dimensions(dimensions: int) -> int:
    """How many dimensions are cached in three bytes."""
    return min(max(2, dimensions // 50), dimensions)


def remembered_nbytes(dimensions: int) -> int:
    """Bytes that the coefficients of a token are cached in."""
    return dimensions + 2 * exact_dimensions(dimensions)


def turned(q_NL: Tensor, turn_KL: Tensor) -> Tensor:
    """Coefficients (int32) under another basis; the same on any machine."""
    return _rounded(q_NL.double() @ turn_KL.double().T).int()


def entry_unit(width: int) -> int:
    """What entries are multiples of, in 1 / 16384: a 19th to a 63rd of their rms."""
    return 1 << max((512 // math.isqrt(width)).bit_length() - 1, 0)


def step_index(size: float) -> int:
    """That of the step nearest to a positive size, by ratio."""
    return round(4 * math.log2(size))


def step_sizes(index_N: Tensor) -> Tensor:
    """Those of many indices (float64)."""
    quarter_4 = torch.tensor(_quarters(), dtype=torch.float64)
    return torch.ldexp(quarter_4[index_N % 4], index_N.div(4, rounding_mode="floor"))


def rescaled(q_NK: Tensor, old_N: Tensor, new_N: Tensor) -> Tensor:
    """Coefficients (int32) in steps of indices `old_N`, in those of indices `new_N`."""
    if torch.equal(old_N, new_N):
        return q_NK
    factor_N = step_sizes(old_N - new_N)
    # clamped: a float beyond int32 becomes any number
    return torch.floor(q_NK.double() * factor_N[:, None] + 0.5).clamp_(-(2**30), 2**30).int()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In fp32, also where a model's own products are in bf16."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _rounded(product: Tensor) -> Tensor:
    """Of whole numbers and entries, in whole numbers again."""
    return torch.floor((product + ONE / 2) / ONE)


@functools.cache
def _quarters() -> tuple[float, ...]:
    """2^(i / 4), rounded to 2^-20, so that products with coefficients are exact."""
    with localcontext() as context:
        context.prec = 30
        exact = [(Decimal(i) / 4 * Decimal(2).ln()).exp() for i in range(4)]
        return tuple(float(int(value * 2**20 + Decimal("0.5")) / 2**20) for value in exact)
