"""Whole-number coefficients of tokens to bytes and back, by static models of their magnitudes.

The model of a coefficient is that of its dimension, raised by the scale of its token (5 bits, in
half octaves). Bytes, after `counts`: the tokens' scales and the coefficients, entropy-coded, then
32 bits for each coefficient that is outside the symbols of its model: none is clipped.

Axes: N tokens, K dimensions, J models, T scales of a token, S symbols, E numbers outside them.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.coefficients import Layout

SCALES = 32
"""Scales of a token; 16 leaves the models of the dimensions as they are."""
UNSCALED = 16  # in the middle: scales raise a model by 2^-8 to 2^7.5
LARGEST = 2**28 - 1
"""Of coefficients, so that their differences and small multiples are int32 too."""
_MASSIVE = 256.0
"""Times what is expected: a dimension counts for no more where the scale of its token is chosen."""
_COUNTS = struct.Struct("<III")
_NUMBER_NBYTES = 4  # an int32 as it is


class Coded(NamedTuple):
    """What both ends know of coefficients once they are coded: they learn from it alike."""

    q_NK: Tensor
    scale_N: Tensor
    model_TK: Tensor
    """The model of each dimension, under each scale of a token."""


def capacity(tokens: int, dimensions: int) -> int:
    """Most bytes of a message."""
    return _COUNTS.size + _NUMBER_NBYTES * tokens * dimensions


def encode(q_NK: Tensor, model_K: Tensor, scales: rans.Tables, wire: Tensor) -> tuple[int, Coded]:
    """Write whole numbers (int32); returns the bytes used, and what was coded.

    `scales` has the frequencies of the tokens' scales. What would be longer than 32 bits each goes
    as it is.
    """
    model_TK = models(model_K)
    scale_N = _best_scales(q_NK, model_K, model_TK)
    sent = Coded(q_NK, scale_N, model_TK)
    parts = [coded(scale_N.to(torch.uint8), None, scales), *_coded_values(sent)]
    counts = [part.numel() for part in parts]
    if sum(counts) > _NUMBER_NBYTES * q_NK.numel():  # so `capacity` holds, whatever the values are
        parts, counts = [q_NK.flatten().view(torch.uint8)], [0, 0, _NUMBER_NBYTES * q_NK.numel()]
        sent = _unscaled(q_NK, model_TK)
    used = _COUNTS.size + sum(counts)
    torch.cat([as_bytes(_COUNTS.pack(*counts)), *parts], out=wire[:used])
    return used, sent


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
    values, model_TK = tokens * model_K.numel(), models(model_K)
    if not first and values:
        if escaped != _NUMBER_NBYTES * values:
            raise CodingError(f"coefficients: {escaped} bytes for {values} values of 4 bytes")
        return _unscaled(_as_numbers(parts[2]).view(tokens, -1), model_TK)
    scale_N = torch.empty(tokens, dtype=torch.uint8)
    rans.decode(parts[0], None, scales, scale_N)
    scale_N, layout = scale_N.long(), _layout(model_TK)
    kernels = load("coefficients", "numba")
    table_S = torch.empty(layout.symbols(scale_N), dtype=torch.uint8)
    kernels.tables(scale_N, layout, table_S)
    symbol_S = torch.empty_like(table_S)
    rans.decode(parts[1], table_S, logistic.tables(), symbol_S)
    q_NK = torch.empty(tokens, model_K.numel(), dtype=torch.int32)
    outside_E = _as_numbers(parts[2][: escaped // _NUMBER_NBYTES * _NUMBER_NBYTES])
    if escaped % _NUMBER_NBYTES or not kernels.join(symbol_S, outside_E, scale_N, layout, q_NK):
        raise CodingError(f"coefficients: {escaped} bytes of large ones, expected another number")
    return Coded(q_NK, scale_N, model_TK)


def as_bytes(data: bytes) -> Tensor:
    """A tensor (uint8) of bytes, of which there must be some."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def coded(symbol_S: Tensor, table_S: Tensor | None, tables: rans.Tables) -> Tensor:
    """Symbols (uint8) as bytes; `rans.decode` reads them."""
    wire = torch.empty(rans.capacity(symbol_S.numel()), dtype=torch.uint8)
    return wire[: rans.encode(symbol_S, table_S, tables, wire)]


def models(model_K: Tensor) -> Tensor:
    """The model of each dimension under each scale of a token (int64 [T, K])."""
    raised_T1 = 2 * (torch.arange(SCALES) - UNSCALED)[:, None]
    return (model_K[None] + raised_T1).clamp_(0, logistic.MODELS - 1)


def _layout(model_TK: Tensor) -> Layout:
    shift_TK, table_TK = logistic.shifts()[model_TK], logistic.table_ids()[model_TK]
    return Layout(shift_TK.to(torch.uint8), table_TK, logistic.UNIFORM - 1)


def _coded_values(sent: Coded) -> tuple[Tensor, Tensor]:
    q_NK, scale_N, model_TK = sent
    layout, kernels = _layout(model_TK), load("coefficients", "numba")
    symbol_S = torch.empty(layout.symbols(scale_N), dtype=torch.uint8)
    table_S, outside_E = torch.empty_like(symbol_S), torch.empty_like(q_NK).flatten()
    outside = kernels.split(q_NK, scale_N, layout, symbol_S, outside_E)
    kernels.tables(scale_N, layout, table_S)
    symbols = coded(symbol_S, table_S, logistic.tables())
    return symbols, outside_E[:outside].view(torch.uint8)


def _unscaled(q_NK: Tensor, model_TK: Tensor) -> Coded:
    return Coded(q_NK, torch.full((q_NK.shape[0],), UNSCALED), model_TK)


def _as_numbers(wire: Tensor) -> Tensor:
    """int32; the bytes may lie anywhere in a message."""
    return wire.clone().view(torch.int32)


def _best_scales(q_NK: Tensor, model_K: Tensor, model_TK: Tensor) -> Tensor:
    """For each token the scale (int64) under which magnitudes as large are expected."""
    magnitude_J = logistic.magnitudes().float()
    # as of two octaves below the last unshifted: what rounds to zero would outweigh all others
    weight_K = 1 / magnitude_J[model_K].clamp_min(magnitude_J[logistic.LAST_UNSHIFTED - 8])
    expected_T = magnitude_J[model_TK] @ weight_K
    between = (expected_T[1:] * expected_T[:-1]).sqrt()  # halfway, by ratio
    found_NK = q_NK.abs().float() * (1 << logistic.MAGNITUDE_BITS) * weight_K
    found_N = found_NK.clamp_max_(_MASSIVE).sum(1)
    return torch.searchsorted(between, found_N)
