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

_POINT = 14
ONE = 1 << _POINT


@dataclass(frozen=True)
class Basis:
    """K directions in D channels, as columns (int16, in 1 / 16384), the widest first.

    Coefficients are cached in a byte each: on average, as those of the first `wide` dimensions
    take two, and those of the last 2 `wide` half a byte. With an `order` the directions are the
    channels of these numbers, and no product is needed.
    """

    entry_DK: Tensor
    wide: int = 0
    order_D: Tensor | None = None

    @staticmethod
    def identity(width: int) -> "Basis":
        return Basis.of_channels(torch.arange(width))

    @staticmethod
    def of_channels(order_D: Tensor, wide: int = 0) -> "Basis":
        width = len(order_D)
        entry_DK = torch.zeros(width, width, dtype=torch.int16)
        entry_DK[order_D, torch.arange(width)] = ONE
        return Basis(entry_DK, wide, order_D)

    @staticmethod
    def nearest(v_DK: Tensor, wide: int) -> "Basis":
        unit = entry_unit(len(v_DK))
        entry_DK = (v_DK * (ONE / unit)).round().clamp(-ONE // unit, ONE // unit) * unit
        return Basis(entry_DK.to(torch.int16).contiguous(), wide)

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
        return crc32(self.entry_DK, self.wide)

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

    def remembered(self, q_NK: Tensor) -> Tensor:
        """Coefficients (int32) in K bytes a token (uint8); larger ones than fit are clamped."""
        wide, narrow = self.wide, q_NK.shape[1] - 2 * self.wide
        wide_NW = q_NK[:, :wide].clamp(-(2**15) + 1, 2**15 - 1)
        usual_NU = q_NK[:, wide:narrow].clamp(-(2**7) + 1, 2**7 - 1)
        low_NW, high_NW = q_NK[:, narrow:].clamp(-(2**3) + 1, 2**3 - 1).tensor_split(2, 1)
        parts = [wide_NW, wide_NW >> 8, usual_NU, (low_NW & 15) | (high_NW << 4)]
        return (torch.cat(parts, 1) & 255).to(torch.uint8)

    def recalled(self, stored_NK: Tensor) -> Tensor:
        """Coefficients (int32) from their bytes."""
        wide, narrow = self.wide, stored_NK.shape[1] - self.wide
        signed_NK = stored_NK.view(torch.int8).int()
        low_NW, high_NW = stored_NK[:, :wide].int(), signed_NK[:, wide : 2 * wide]
        half_NW = signed_NK[:, narrow:]
        parts = [high_NW << 8 | low_NW, signed_NK[:, 2 * wide : narrow]]
        return torch.cat([*parts, (half_NW << 28) >> 28, half_NW >> 4], 1)

    def turn_from(self, other: "Basis") -> Tensor:
        """What turns coefficients under another basis into those in this one (int32 [K, L])."""
        entry_KD = self.entry_DK.double().T
        turn_KL = _rounded(entry_KD @ other.entry_DK.double())
        gram_KK = _rounded(entry_KD @ entry_KD.T)  # 1 where directions are orthonormal
        return (2 * turn_KL - _rounded(gram_KK @ turn_KL)).int()


def turned(q_NL: Tensor, turn_KL: Tensor) -> Tensor:
    """Coefficients (int32) under another basis; the same on any machine."""
    return _rounded(q_NL.double() @ turn_KL.double().T).int()


def entry_unit(width: int) -> int:
    """What entries are multiples of, in 1 / 16384: a 19th to a 63rd of their rms."""
    return 1 << max((512 // math.isqrt(width)).bit_length() - 1, 0)


def step_size(index: int) -> float:
    """2^(index / 4), the same on any machine."""
    return math.ldexp(_quarters()[index % 4], index // 4)


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
