"""The rANS kernels on CPUs, compiled by numba; the coding is described in `../rans.py`.

Eight states in turn hide each other's latency. A word is always loaded, or stored, and the position
moves on only if it counts: which ones do is close to random, and a branch would cost more.

All tensors are contiguous, on the CPU. Axes: N values, W bytes. Symbols are below S and models
below K; without `model_N` all are 0.
"""

from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.rans import (
    BLOCK,
    LANES,
    LOWEST,
    PROBABILITY_BITS,
    RECIPROCAL_BITS,
    SLOTS,
    STORED,
    Lookup,
)

_LOW = np.uint32(0xFFFF)
_SLOT = np.uint32(SLOTS - 1)
_FULL_SHIFT, _SLOT_SHIFT = np.uint32(32 - PROBABILITY_BITS), np.uint32(PROBABILITY_BITS)
_STATES_NBYTES = 4 * LANES


def encode(symbol_N: Tensor, model_N: Tensor | None, lookup: Lookup, wire_W: Tensor) -> int:
    """Write blocks to the start of `wire_W`, which has room for stored ones; returns bytes."""
    entry = lookup.entry_KS.numpy().view(np.uint32).reshape(-1)
    reciprocal = lookup.reciprocal_KS.numpy().view(np.uint64).reshape(-1)
    models = None if model_N is None else model_N.numpy()
    planes = (lookup.symbols - 1).bit_length()
    return int(_encode(symbol_N.numpy(), models, entry, reciprocal, planes, wire_W.numpy()))


def decode(wire_W: Tensor, model_N: Tensor | None, lookup: Lookup, symbol_N: Tensor) -> bool:
    """Write the symbols, all below S; False if the bytes are not those of so many."""
    entry = lookup.entry_KS.numpy().view(np.uint32).reshape(-1)
    slots = lookup.symbol_KM.numpy().reshape(-1)
    models = None if model_N is None else model_N.numpy()
    stored = (lookup.symbols, (lookup.symbols - 1).bit_length())
    return bool(_decode(wire_W.numpy(), models, entry, slots, stored, symbol_N.numpy()))


def count(symbol_N: Tensor, count_S: Tensor) -> None:
    """Add to `count_S` (int64) how often each symbol occurs."""
    _count(symbol_N.numpy(), count_S.numpy())


@njit
def _begin(symbol: Any, block: Any) -> Any:
    """The state in which all lanes of a block begin."""
    total = np.uint32(257 * block)
    for i in range(symbol.size):
        total += np.uint32(symbol[i])
    return np.uint32(LOWEST) | (np.uint32(total) & _LOW)


@njit
def _take_in(x: Any, entry: Any, reciprocal: Any, words: Any, at: Any) -> Any:
    """A state with one more symbol, and where the words begin now."""
    freq = entry >> np.uint32(16)
    emitted = np.uint32((x >> _FULL_SHIFT) >= freq)  # x >= freq << 20, which may be 2^32
    words[np.uint64(at - 1)] = np.uint16(x & _LOW)  # unsigned: else numba looks for wraparound
    x = x >> np.uint32(emitted << np.uint32(4))  # by 16 or 0: no branch
    quotient = np.uint32((np.uint64(x) * reciprocal) >> np.uint64(RECIPROCAL_BITS))
    # 4096 (x // freq) + x % freq + start, with one product
    x = x + quotient * (np.uint32(SLOTS) - freq) + (entry & _LOW)
    return np.uint32(x), at - np.int64(emitted)


@njit
def _place(model: Any, i: Any, symbol: Any) -> Any:
    if model is None:
        return np.uint64(symbol)
    return np.uint64(model[np.uint64(i)]) << np.uint64(5) | np.uint64(symbol)  # rows of 32 entries


@njit
def _encode_block(
    symbol: Any, model: Any, entry: Any, reciprocal: Any, words: Any, state: Any
) -> Any:
    """Fill `words` from its end on and return where they begin; `state` is a lane's."""
    at, full = words.size, symbol.size // LANES * LANES
    for i in range(symbol.size - 1, full - 1, -1):
        e = _place(model, i, symbol[i])
        state[i - full], at = _take_in(state[i - full], entry[e], reciprocal[e], words, at)
    for step in range(full - LANES, -1, -LANES):
        for lane in range(LANES - 1, -1, -1):
            i = step + lane
            e = _place(model, i, symbol[np.uint64(i)])
            state[lane], at = _take_in(state[lane], entry[e], reciprocal[e], words, at)
    return at


@njit
def _store(symbol: Any, planes: Any, wire: Any, at: Any) -> Any:
    """Write a block's planes; returns where they end."""
    for p in range(planes):
        for start in range(0, symbol.size, 8):
            byte = np.uint32(0)
            for i in range(min(8, symbol.size - start)):
                bit = (np.uint32(symbol[start + i]) >> np.uint32(p)) & np.uint32(1)
                byte |= bit << np.uint32(i)
            wire[at] = byte
            at += 1
    return at


@compiled
def _encode(symbol: Any, model: Any, entry: Any, reciprocal: Any, planes: Any, wire: Any) -> Any:
    words = np.empty(min(symbol.size, BLOCK), np.uint16)  # at most one for each symbol
    state = np.empty(LANES, np.uint32)
    states, word_bytes = state.view(np.uint8), words.view(np.uint8)
    blocks = (symbol.size + BLOCK - 1) // BLOCK
    end = 2 * blocks
    for block in range(blocks):
        part = symbol[block * BLOCK : (block + 1) * BLOCK]
        models = None if model is None else model[block * BLOCK : (block + 1) * BLOCK]
        state[:] = _begin(part, block)
        at = _encode_block(part, models, entry, reciprocal, words, state)
        count, start = words.size - at, end
        if _STATES_NBYTES + 2 * count < planes * ((part.size + 7) // 8):
            wire[start : start + _STATES_NBYTES] = states
            end = start + _STATES_NBYTES + 2 * count
            wire[start + _STATES_NBYTES : end] = word_bytes[2 * at :]
        else:
            count, end = STORED, _store(part, planes, wire, start)
        wire[2 * block], wire[2 * block + 1] = count & 255, count >> 8
    return end


@njit
def _word(wire: Any, at: Any) -> Any:
    low, high = np.uint32(wire[np.uint64(at)]), np.uint32(wire[np.uint64(at + 1)])
    return low | high << np.uint32(8)


@njit
def _give_back(x: Any, model: Any, i: Any, entry: Any, slots: Any) -> Any:
    """A symbol, and the state without it, which may be below the lowest."""
    slot = x & _SLOT
    if model is None:
        symbol = slots[np.uint64(slot)]
    else:
        symbol = slots[
            np.uint64(model[np.uint64(i)]) << np.uint64(PROBABILITY_BITS) | np.uint64(slot)
        ]
    e = entry[_place(model, i, symbol)]
    return symbol, np.uint32((x >> _SLOT_SHIFT) * (e >> np.uint32(16)) + slot - (e & _LOW))


@njit
def _refilled(x: Any, wire: Any, at: Any) -> Any:
    """A state with a word more if it is too low, and where the next word is."""
    low = np.uint32(x < np.uint32(LOWEST))
    word = _word(wire, at) & (np.uint32(0) - low)  # all bits of it or none: no branch
    return np.uint32(x << np.uint32(low << np.uint32(4)) | word), at + 2 * np.int64(low)


@njit
def _decode_block(wire: Any, model: Any, entry: Any, slots: Any, symbol: Any, state: Any) -> Any:
    """Write the symbols; returns where reading ended, past the end of `wire` if it is too short."""
    at, i, full = 0, 0, symbol.size // LANES * LANES
    while i < full and at + 2 * LANES <= wire.size:  # each lane may read a word: none is checked
        for lane in range(LANES):
            # unsigned places: 22 instructions a value, where numba's signed ones took 33
            symbol[np.uint64(i + lane)], x = _give_back(state[lane], model, i + lane, entry, slots)
            state[lane], at = _refilled(x, wire, at)
        i += LANES
    while i < symbol.size:
        lane = i % LANES
        symbol[i], x = _give_back(state[lane], model, i, entry, slots)
        if x < np.uint32(LOWEST):
            if at + 2 > wire.size:
                return wire.size + 1
            x = x << np.uint32(16) | _word(wire, at)
            at += 2
        state[lane] = x
        i += 1
    return at


@njit
def _states(wire: Any, state: Any) -> Any:
    """Read the states; False if one is too low."""
    for lane in range(LANES):
        high = _word(wire, 4 * lane + 2)
        if high == 0:  # below 2^16: no encoder leaves that
            return False
        state[lane] = high << np.uint32(16) | _word(wire, 4 * lane)
    return True


@njit
def _unstore(wire: Any, stored: Any, symbol: Any) -> Any:
    """Read a block's planes; False if a symbol is too large."""
    symbols, planes = stored
    nbytes, largest = (symbol.size + 7) // 8, np.uint32(0)
    for i in range(symbol.size):
        value = np.uint32(0)
        for p in range(planes):
            bit = (np.uint32(wire[p * nbytes + i // 8]) >> np.uint32(i % 8)) & np.uint32(1)
            value |= bit << np.uint32(p)
        symbol[i] = value
        largest = max(largest, value)
    return largest < symbols  # looked at once, behind the loop


@compiled
def _decode(wire: Any, model: Any, entry: Any, slots: Any, stored: Any, symbol: Any) -> Any:
    """`stored` = (symbols, planes of a stored block)."""
    state = np.empty(LANES, np.uint32)
    blocks = (symbol.size + BLOCK - 1) // BLOCK
    end = 2 * blocks
    if wire.size < end:
        return False
    for block in range(blocks):
        part = symbol[block * BLOCK : (block + 1) * BLOCK]
        models = None if model is None else model[block * BLOCK : (block + 1) * BLOCK]
        count, start = np.int64(_word(wire, 2 * block)), end
        if count == STORED:
            end = start + stored[1] * ((part.size + 7) // 8)
            if end > wire.size or not _unstore(wire[start:end], stored, part):
                return False
            continue
        end, first = start + _STATES_NBYTES + 2 * count, start + _STATES_NBYTES
        if end > wire.size or not _states(wire[start:first], state):
            return False
        if _decode_block(wire[first:end], models, entry, slots, part, state) != 2 * count:
            return False
        if not (state == _begin(part, block)).all():  # damage that decodes to symbols all the same
            return False
    return end == wire.size


@compiled
def _count(symbol: Any, count: Any) -> Any:
    """Four tables: an addition need not wait for that of the value before it."""
    counts, full = np.zeros(4 * 256, np.int64), symbol.size // 4 * 4
    for start in range(0, full, 4):
        for i in range(4):
            counts[np.uint64(256 * i) + np.uint64(symbol[start + i])] += 1
    for i in range(full, symbol.size):
        counts[symbol[i]] += 1
    for s in range(count.size):
        count[s] += counts[s] + counts[256 + s] + counts[512 + s] + counts[768 + s]
