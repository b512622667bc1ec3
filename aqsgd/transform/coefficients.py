"""Whole-number coefficients of tokens to bytes and back, by static models of their magnitudes.

The model of a coefficient is that of its dimension, raised by the scale of its token (5 bits, in
half octaves). Bytes, after `counts`: the tokens' scales and the coefficients, entropy-coded, then
16 bits for each coefficient that is outside the symbols of its model. Last come places and values,
32 bits each, of those that 16 bits do not hold: massive activations, whose channels or tokens are
thousands of times larger than the rest.

Axes: N tokens, K dimensions, J models, T scales of a token, S symbols, E numbers outside them,
X numbers beyond 16 bits.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.coefficients import CoefficientKernels, Layout

SCALES = 32
"""Scales of a token; 16 leaves the models of the dimensions as they are."""
UNSCALED = 16
LARGEST = 2**15 - 1
"""Of a coefficient in 16 bits."""
LIMIT = 2**30
"""Of any coefficient."""
_COUNTS = struct.Struct("<IIII")


class Coded(NamedTuple):
    """What both ends know of coefficients once they are coded: they learn from it alike."""

    q_NK: Tensor
    scale_N: Tensor
    model_TK: Tensor
    """The model of each dimension, under each scale of a token."""


def capacity(tokens: int, dimensions: int) -> int:
    """Most bytes of a message."""
    values = tokens * dimensions
    return _COUNTS.size + 2 * values + 8 * most_beyond(values)


def most_beyond(values: int) -> int:
    """How many of so many coefficients may be larger than `LARGEST`."""
    return values // 64


def encode(q_NK: Tensor, model_K: Tensor, scales: rans.Tables, wire: Tensor) -> tuple[int, Coded]:
    """Write whole numbers (int32, at most `LIMIT`); returns the bytes used, and what was coded.

    `scales` has the frequencies of the tokens' scales. What would be longer than 16 bits each goes
    as it is. If there are more than `most_beyond` larger than `LARGEST`, the rest are clamped.
    """
    model_TK, beyond_X2 = models(model_K), _beyond(q_NK)
    q_NK = q_NK.clamp(-LARGEST, LARGEST)
    q_NK.view(-1)[beyond_X2[:, 0].long()] = 0  # so that they do not set the scale of their token
    scale_N = _best_scales(q_NK, model_K, model_TK)
    coded = Coded(q_NK, scale_N, model_TK)
    parts = [_coded_scales(scale_N, scales), *_coded_values(coded)]
    counts = [part.numel() for part in parts]
    if sum(counts) > 2 * q_NK.numel():
        parts, counts = [_as_bytes(q_NK)], [0, 0, 2 * q_NK.numel()]
        coded = _unscaled(q_NK, model_TK)
    _put(q_NK, beyond_X2)
    parts.append(beyond_X2.flatten().view(torch.uint8))
    counts.append(parts[-1].numel())
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
    counts = _COUNTS.unpack(wire[: _COUNTS.size].numpy().tobytes())
    if _COUNTS.size + sum(counts) != wire.numel():
        words = " + ".join(map(str, counts))
        raise CodingError(f"coefficients: {words} bytes do not fill {wire.numel()}")
    parts = wire[_COUNTS.size :].tensor_split(list(accumulate(counts[:-1])))
    coded = _decoded(parts, tokens, model_K, scales)
    if parts[3].numel() % 8:
        raise CodingError(f"coefficients: {parts[3].numel()} bytes of numbers that take 8 each")
    beyond_X2 = parts[3].clone().view(torch.int32).view(-1, 2)
    place_X, values = beyond_X2[:, 0], tokens * model_K.numel()
    if bool(((place_X < 0) | (place_X >= values)).any()):
        raise CodingError(f"coefficients: places of large ones are not among {values}")
    _put(coded.q_NK, beyond_X2)
    return coded


def _decoded(parts: Sequence[Tensor], tokens: int, model_K: Tensor, scales: rans.Tables) -> Coded:
    """All but what is beyond 16 bits."""
    values, model_TK, escaped = tokens * model_K.numel(), models(model_K), parts[2].numel()
    if not parts[0].numel() and values:
        if escaped != 2 * values:
            raise CodingError(f"coefficients: {escaped} bytes for {values} values of 2 bytes")
        return _unscaled(_as_numbers(parts[2]).int().view(tokens, -1), model_TK)
    scale_N = torch.empty(tokens, dtype=torch.uint8)
    rans.decode(parts[0], None, scales, scale_N)
    scale_N, layout = scale_N.long(), _layout(model_TK)
    kernels: CoefficientKernels = load("coefficients")
    table_S = torch.empty(layout.symbols(scale_N), dtype=torch.uint8)
    kernels.tables(scale_N, layout, table_S)
    symbol_S = torch.empty_like(table_S)
    rans.decode(parts[1], table_S, logistic.tables(), symbol_S)
    q_NK = torch.empty(tokens, model_K.numel(), dtype=torch.int32)
    outside_E = _as_numbers(parts[2][: escaped // 2 * 2])
    if escaped % 2 or not kernels.join(symbol_S, outside_E, scale_N, layout, q_NK):
        raise CodingError(f"coefficients: {escaped} bytes of large ones, expected another number")
    return Coded(q_NK, scale_N, model_TK)


def models(model_K: Tensor) -> Tensor:
    """The model of each dimension under each scale of a token (int64 [T, K])."""
    raised_T1 = 2 * (torch.arange(SCALES) - UNSCALED)[:, None]
    return (model_K[None] + raised_T1).clamp_(0, logistic.MODELS - 1)


def _beyond(q_NK: Tensor) -> Tensor:
    """Places and values (int32 [X, 2]) of coefficients that 16 bits do not hold."""
    flat = q_NK.flatten()
    place_X = torch.nonzero(flat.abs() > LARGEST).flatten()
    if len(place_X) > (most := most_beyond(flat.numel())):
        place_X = place_X[flat[place_X].abs().topk(most).indices].sort().values
    return torch.stack([place_X.int(), flat[place_X]], 1)


def _put(q_NK: Tensor, beyond_X2: Tensor) -> None:
    q_NK.view(-1)[beyond_X2[:, 0].long()] = beyond_X2[:, 1]


def _layout(model_TK: Tensor) -> Layout:
    shift_TK, table_TK = logistic.shifts()[model_TK], logistic.table_ids()[model_TK]
    return Layout(shift_TK.to(torch.uint8), table_TK, logistic.UNIFORM - 1)


def _coded_scales(scale_N: Tensor, scales: rans.Tables) -> Tensor:
    wire = torch.empty(rans.capacity(scale_N.numel()), dtype=torch.uint8)
    return wire[: rans.encode(scale_N.to(torch.uint8), None, scales, wire)]


def _coded_values(coded: Coded) -> tuple[Tensor, Tensor]:
    """Bytes of all coefficients, and of those outside the symbols."""
    q_NK, scale_N, model_TK = coded
    layout, kernels = _layout(model_TK), load("coefficients")
    symbol_S = torch.empty(layout.symbols(scale_N), dtype=torch.uint8)
    table_S, outside_E = torch.empty_like(symbol_S), torch.empty(q_NK.numel(), dtype=torch.int16)
    outside = kernels.split(q_NK, scale_N, layout, symbol_S, outside_E)
    kernels.tables(scale_N, layout, table_S)
    wire = torch.empty(rans.capacity(symbol_S.numel()), dtype=torch.uint8)
    used = rans.encode(symbol_S, table_S, logistic.tables(), wire)
    return wire[:used], outside_E[:outside].view(torch.uint8)


def _unscaled(q_NK: Tensor, model_TK: Tensor) -> Coded:
    """Coefficients that were sent as they are."""
    return Coded(q_NK, torch.full((q_NK.shape[0],), UNSCALED), model_TK)


def _as_bytes(q: Tensor) -> Tensor:
    return q.flatten().to(torch.int16).view(torch.uint8)


def _as_numbers(wire: Tensor) -> Tensor:
    """int16; the bytes may lie anywhere in a message."""
    return wire.clone().view(torch.int16)


def _best_scales(q_NK: Tensor, model_K: Tensor, model_TK: Tensor) -> Tensor:
    """For each token the scale (int64) under which magnitudes as large are expected."""
    magnitude_J = logistic.magnitudes().float()
    weight_K = 1 / magnitude_J[model_K].clamp_min(magnitude_J[logistic.LAST_UNSHIFTED - 8])
    expected_T = magnitude_J[model_TK] @ weight_K
    between = (expected_T[1:] * expected_T[:-1]).sqrt()
    found_N = (q_NK.abs().float() * (1 << logistic.MAGNITUDE_BITS)) @ weight_K
    return torch.searchsorted(between, found_N)
