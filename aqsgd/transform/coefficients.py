"""Whole-number coefficients of tokens to bytes and back, by static models of their magnitudes.

The model of a coefficient is that of its dimension, raised by the scale of its token (5 bits, in
half octaves). Bytes, after `counts`: the tokens' scales and the coefficients, entropy-coded, then
16 bits for each coefficient that is outside the symbols of its model.

Axes: N tokens, K dimensions, J models.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import CodingError

SCALES = 32
"""Scales of a token; 16 leaves the models of the dimensions as they are."""
UNSCALED = 16
LARGEST = 2**15 - 1
_COUNTS = struct.Struct("<III")


class Coded(NamedTuple):
    """What both ends know of coefficients once they are coded: they learn from it alike."""

    q_NK: Tensor
    scale_N: Tensor
    model_NK: Tensor


def capacity(tokens: int, dimensions: int) -> int:
    """Most bytes of a message."""
    return _COUNTS.size + 2 * tokens * dimensions


def encode(q_NK: Tensor, model_K: Tensor, scales: rans.Tables, wire: Tensor) -> tuple[int, Coded]:
    """Write whole numbers (int32, at most `LARGEST`); returns the bytes used, and what was coded.

    `scales` has the frequencies of the tokens' scales. What would be longer than 16 bits each goes
    as it is.
    """
    scale_N = _best_scales(q_NK, model_K)
    coded = Coded(q_NK, scale_N, models(model_K, scale_N))
    parts = [_coded_scales(scale_N, scales), *_coded_values(coded)]
    counts = [part.numel() for part in parts]
    if sum(counts) > 2 * q_NK.numel():
        parts, counts = [_as_bytes(q_NK)], [0, 0, 2 * q_NK.numel()]
        coded = _unscaled(q_NK, model_K)
    packed = torch.frombuffer(bytearray(_COUNTS.pack(*counts)), dtype=torch.uint8)
    used = _COUNTS.size + sum(counts)
    torch.cat([packed, *parts], out=wire[:used])
    return used, coded


def decode(wire: Tensor, tokens: int, model_K: Tensor, scales: rans.Tables) -> Coded:
    """Read what `encode` wrote; `wire` holds these bytes and no more.

    Raises:
        CodingError: they are damaged, or those of another number of values.
    """
    if wire.numel() < _COUNTS.size:
        raise CodingError(f"coefficients of {wire.numel()} bytes: fewer than their counts take")
    first, second, escaped = _COUNTS.unpack(wire[: _COUNTS.size].numpy().tobytes())
    if _COUNTS.size + first + second + escaped != wire.numel():
        raise CodingError(
            f"coefficients: {first} + {second} + {escaped} bytes do not fill {wire.numel()}"
        )
    parts = wire[_COUNTS.size :].tensor_split([first, first + second])
    values = tokens * model_K.numel()
    if not first and values:
        if escaped != 2 * values:
            raise CodingError(f"coefficients: {escaped} bytes for {values} values of 2 bytes")
        return _unscaled(_as_numbers(parts[2]).view(tokens, -1), model_K)
    scale_N = torch.empty(tokens, dtype=torch.uint8)
    rans.decode(parts[0], None, scales, scale_N)
    scale_N = scale_N.long()
    model_NK = models(model_K, scale_N)
    shift_NK = logistic.shifts()[model_NK]
    widths = _digit_widths(shift_NK)
    more = [_digit_tables(width) for _, width in widths]
    table = torch.cat([logistic.table_ids()[model_NK].flatten(), *more])
    symbols = torch.empty(table.numel(), dtype=torch.uint8)
    rans.decode(parts[1], table, logistic.tables(), symbols)
    symbol_NK = symbols[: model_NK.numel()].view(model_NK.shape).int()
    q_NK = _joined(symbol_NK, shift_NK, symbols[model_NK.numel() :], widths)
    outside_NK = _outside(symbol_NK)
    if 2 * int(outside_NK.sum()) != escaped:
        raise CodingError(f"coefficients: {escaped} bytes of large ones, expected another number")
    q_NK[outside_NK] = _as_numbers(parts[2])
    return Coded(q_NK, scale_N, model_NK)


def models(model_K: Tensor, scale_N: Tensor) -> Tensor:
    """The model of every coefficient (int64)."""
    raised_N1 = 2 * (scale_N - UNSCALED)[:, None]
    return (model_K[None] + raised_N1).clamp_(0, logistic.MODELS - 1)


def _coded_scales(scale_N: Tensor, scales: rans.Tables) -> Tensor:
    wire = torch.empty(rans.capacity(scale_N.numel()), dtype=torch.uint8)
    return wire[: rans.encode(scale_N.to(torch.uint8), None, scales, wire)]


def _coded_values(coded: Coded) -> tuple[Tensor, Tensor]:
    """Bytes of all coefficients, and of those outside the symbols."""
    shift_NK = logistic.shifts()[coded.model_NK]
    symbol_NK = (coded.q_NK >> shift_NK) + logistic.MIDDLE
    symbol_NK = symbol_NK.clamp_(0, logistic.SYMBOLS - 1)
    outside_NK = _outside(symbol_NK)
    digits, more = _digits(coded.q_NK, shift_NK, ~outside_NK)
    symbols = torch.cat([symbol_NK.flatten().to(torch.uint8), *digits])
    table = torch.cat([logistic.table_ids()[coded.model_NK].flatten(), *more])
    wire = torch.empty(rans.capacity(symbols.numel()), dtype=torch.uint8)
    used = rans.encode(symbols, table, logistic.tables(), wire)
    return wire[:used], _as_bytes(coded.q_NK[outside_NK])


def _unscaled(q_NK: Tensor, model_K: Tensor) -> Coded:
    """Coefficients that were sent as they are."""
    scale_N = torch.full((q_NK.shape[0],), UNSCALED)
    return Coded(q_NK, scale_N, models(model_K, scale_N))


def _as_bytes(q: Tensor) -> Tensor:
    return q.flatten().to(torch.int16).view(torch.uint8)


def _as_numbers(wire: Tensor) -> Tensor:
    """int32; the bytes may lie anywhere in a message."""
    return wire.clone().view(torch.int16).int()


def _outside(symbol_NK: Tensor) -> Tensor:
    """Where the symbol stands for all that is at least as large."""
    return (symbol_NK == 0) | (symbol_NK == logistic.SYMBOLS - 1)


def _best_scales(q_NK: Tensor, model_K: Tensor) -> Tensor:
    """For each token the scale (int64) under which magnitudes as large are expected."""
    magnitude_J = logistic.magnitudes().float()
    weight_K = 1 / magnitude_J[model_K].clamp_min(magnitude_J[logistic.LAST_UNSHIFTED - 8])
    every = models(model_K, torch.arange(SCALES))
    expected = magnitude_J[every] @ weight_K
    between = (expected[1:] * expected[:-1]).sqrt()
    found_N = (q_NK.abs().float() * (1 << logistic.MAGNITUDE_BITS)) @ weight_K
    return torch.searchsorted(between, found_N)


def _digit_widths(shift_NK: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per digit, from the lowest: which coefficients have it (flat), and of how many bits."""
    shift_N, found, lower = shift_NK.flatten(), [], 0
    while bool((has := shift_N > lower).any()):
        index = torch.nonzero(has).flatten()
        found.append((index, (shift_N[index] - lower).clamp_max(logistic.DIGIT_BITS)))
        lower += logistic.DIGIT_BITS
    return found


def _digit_tables(width: Tensor) -> Tensor:
    return (logistic.UNIFORM - 1 + width).to(torch.uint8)


def _digits(q_NK: Tensor, shift_NK: Tensor, kept_NK: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Low bits, lowest digits first, and the tables they are coded with; 0 where not kept."""
    q_N = torch.where(kept_NK, q_NK, 0).flatten()
    digits, tables, lower = [], [], 0
    for index, width in _digit_widths(shift_NK):
        digits.append(((q_N[index] >> lower) & ((1 << width) - 1)).to(torch.uint8))
        tables.append(_digit_tables(width))
        lower += logistic.DIGIT_BITS
    return digits, tables


def _joined(
    symbol_NK: Tensor, shift_NK: Tensor, digits: Tensor, widths: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Coefficients (int32) from their symbols and low bits."""
    q_N = ((symbol_NK - logistic.MIDDLE).long() << shift_NK).flatten()
    lower = 0
    for index, _ in widths:
        digit, digits = digits[: index.numel()], digits[index.numel() :]
        q_N[index] += digit.long() << lower
        lower += logistic.DIGIT_BITS
    return q_N.view(symbol_NK.shape).int()
