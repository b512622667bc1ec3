"""Which runs a keyed permutation deals, on CPUs, compiled by numba."""

from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled


def deal(first: int, runs: int, keys: list[int], chosen_R: Tensor) -> None:
    """Write, rising, what a keyed permutation of 0 .. runs - 1 has from place `first` on.

    Places go round past the last one; as many are taken as `chosen_R` (int64) has places.
    A Feistel network permutes 2^b >= runs numbers, b at least 2: rounds in turn xor the high
    and the low half, which has b // 2 bits, with a hash of the other and the round's 32-bit
    key. Numbers that land outside are sent through again (cycle walking: Black and Rogaway,
    CT-RSA 2002), which ends, as a cycle that leaves the range comes back to it.
    """
    chosen = chosen_R.numpy()
    _deal(first, runs, np.array(keys, np.int64), chosen)
    chosen.sort()  # memory is then read forwards


@njit
def _network(value: Any, keys: Any, low_bits: Any, high_bits: Any) -> Any:
    """The Feistel network, with the hash lowbias32 (C. Wellons).

    32-bit words are in int64, of whose products the low half is kept.
    """
    low_mask, high_mask, mask32 = (1 << low_bits) - 1, (1 << high_bits) - 1, 0xFFFFFFFF
    low, high = value & low_mask, value >> low_bits
    for i in range(keys.size):
        word = ((high if i % 2 else low) + keys[i]) & mask32
        word = ((word ^ (word >> 16)) * 0x7FEB352D) & mask32
        word = ((word ^ (word >> 15)) * 0x846CA68B) & mask32
        word ^= word >> 16
        if i % 2:
            low ^= word & low_mask
        else:
            high ^= word & high_mask
    return high << low_bits | low


@compiled
def _deal(first: Any, runs: Any, keys: Any, chosen: Any) -> Any:
    bits = 2
    while (1 << bits) < runs:
        bits += 1
    low_bits = bits // 2
    for i in range(chosen.size):
        value = _network((first + i) % runs, keys, low_bits, bits - low_bits)
        while value >= runs:
            value = _network(value, keys, low_bits, bits - low_bits)
        chosen[i] = value
