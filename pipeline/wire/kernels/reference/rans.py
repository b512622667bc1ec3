"""What the rANS kernels mean, in numpy; the coding is described in `../rans.py`.

Axes: N values, n values of a block, L = 8 lanes, T steps of a value per lane, W bytes.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels.rans import (
    BLOCK,
    LANES,
    LOWEST,
    PROBABILITY_BITS,
    SLOTS,
    STORED,
    Lookup,
    stored_nbytes,
)

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.rans import RansKernels
    from thinpipe.pipeline.wire.kernels.reference import rans as rans_reference

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int64]

_STATES_NBYTES = 4 * LANES


def encode(symbol_N: Tensor, model_N: Tensor | None, lookup: Lookup, wire_W: Tensor) -> int:
    """Write blocks; see `RansKernels.encode`."""
    counts, blocks = list[int](), list[Bytes]()
    for b, (symbol_n, model_n) in enumerate(_blocks(symbol_N, model_N)):
        words, coded = _encode_block(symbol_n, model_n, lookup, _begin(b, symbol_n))
        if len(coded) < stored_nbytes(len(symbol_n), lookup.symbols):
            counts.append(words)
            blocks.append(coded)
        else:
            counts.append(STORED)
            blocks.append(_stored(symbol_n, lookup.symbols))
    message = np.concatenate([np.array(counts, "<u2").view(np.uint8), *blocks])
    wire_W.numpy()[: len(message)] = message
    return len(message)


def decode(wire_W: Tensor, model_N: Tensor | None, lookup: Lookup, symbol_N: Tensor) -> bool:
    """Write the symbols; see `RansKernels.decode`."""
    wire, blocks = wire_W.numpy(), list(_blocks(symbol_N, model_N))
    at = 2 * len(blocks)
    if len(wire) < at:
        return False
    for b, (symbol_n, model_n) in enumerate(blocks):
        words = int(wire[2 * b]) + 256 * int(wire[2 * b + 1])
        nbytes = stored_nbytes(len(symbol_n), lookup.symbols)
        if words != STORED:
            nbytes = _STATES_NBYTES + 2 * words
        part, at = wire[at : at + nbytes], at + nbytes
        if len(part) < nbytes:
            return False
        if words == STORED:
            symbol_n[:] = _unstored(part, len(symbol_n))
            if (symbol_n >= lookup.symbols).any():
                return False
        elif not _decode_block(part, model_n, lookup, symbol_n, b):
            return False
    return at == len(wire)


def count(symbol_N: Tensor, count_S: Tensor) -> None:
    """Add how often each symbol occurs; see `RansKernels.count`."""
    count_S += torch.bincount(symbol_N, minlength=len(count_S))


def _blocks(symbol_N: Tensor, model_N: Tensor | None) -> Iterator[tuple[Bytes, Bytes]]:
    model_N = torch.zeros_like(symbol_N) if model_N is None else model_N
    starts = range(0, symbol_N.numel(), BLOCK)
    symbols, models = symbol_N.numpy(), model_N.numpy()
    return zip(
        (symbols[i : i + BLOCK] for i in starts),
        (models[i : i + BLOCK] for i in starts),
        strict=True,
    )


def _begin(block: int, symbol_n: Bytes) -> int:
    return LOWEST + (257 * block + int(symbol_n.sum(dtype=np.int64))) % (1 << 16)


def _steps(value_n: Words) -> Words:
    """[T, L], filled up with zeros."""
    return np.pad(value_n, (0, -len(value_n) % LANES)).reshape(-1, LANES)


def _encode_block(symbol_n: Bytes, model_n: Bytes, lookup: Lookup, begin: int) -> tuple[int, Bytes]:
    """How many words there are, and the block."""
    entry_n = lookup.entry_KS.numpy()[model_n, symbol_n].astype(np.int64)
    freq_TL, start_TL = _steps(entry_n >> 16), _steps(entry_n & 0xFFFF)
    state_L, last, out = np.full(LANES, begin, np.int64), len(symbol_n) % LANES, list[Words]()
    for t in reversed(range(len(freq_TL))):
        lanes = last if last and t == len(freq_TL) - 1 else LANES
        x, freq, start = state_L[:lanes], freq_TL[t, :lanes], start_TL[t, :lanes]
        full = x >= freq << (32 - PROBABILITY_BITS)
        out.append(x[full] & 0xFFFF)
        x = np.where(full, x >> 16, x)
        state_L[:lanes] = SLOTS * (x // freq) + x % freq + start
    word = np.concatenate([np.empty(0, np.int64), *reversed(out)])
    states = state_L.astype("<u4").view(np.uint8)
    return len(word), np.concatenate([states, word.astype("<u2").view(np.uint8)])


def _decode_block(part: Bytes, model_n: Bytes, lookup: Lookup, symbol_n: Bytes, block: int) -> bool:
    state_L = part[:_STATES_NBYTES].copy().view("<u4").astype(np.int64)
    word = part[_STATES_NBYTES:].copy().view("<u2").astype(np.int64)
    if (state_L < LOWEST).any():
        return False
    at = 0
    for i in range(0, len(symbol_n), LANES):
        model = model_n[i : i + LANES]
        x, slot = state_L[: len(model)], state_L[: len(model)] % SLOTS
        symbol = lookup.symbol_KM.numpy()[model, slot]
        entry = lookup.entry_KS.numpy()[model, symbol].astype(np.int64)
        x = (entry >> 16) * (x // SLOTS) + slot - (entry & 0xFFFF)
        low = x < LOWEST
        read, at = word[at : at + low.sum()], at + int(low.sum())
        if at > len(word):
            return False
        x[low] = x[low] << 16 | read
        state_L[: len(model)], symbol_n[i : i + LANES] = x, symbol
    return at == len(word) and bool((state_L == _begin(block, symbol_n)).all())


def _stored(symbol_n: Bytes, symbols: int) -> Bytes:
    planes = (symbols - 1).bit_length()
    bits = [np.packbits(symbol_n >> p & 1, bitorder="little") for p in range(planes)]
    return np.concatenate([np.empty(0, np.uint8), *bits])


def _unstored(part: Bytes, numel: int) -> Bytes:
    symbol_n, nbytes = np.zeros(numel, np.uint8), -(-numel // 8)
    for p in range(len(part) // nbytes):
        plane = part[p * nbytes : (p + 1) * nbytes]
        symbol_n |= np.unpackbits(plane, count=numel, bitorder="little") << np.uint8(p)
    return symbol_n


if TYPE_CHECKING:
    _checked: RansKernels = rans_reference
