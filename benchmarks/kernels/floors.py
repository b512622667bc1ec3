"""Loops that move a kernel's bytes without its arithmetic; arrays are words of the values' width.

They are plain loops without software prefetch, so a kernel can be faster than its floor. Every
input line is read and every output line is written; what is computed means nothing.
"""

from typing import Any

import numba
import numpy as np


@numba.njit(nogil=True)
def read(x: Any) -> int:
    """Read every word of x."""
    seen = np.uint32(0)
    for i in range(x.size):
        seen |= x[i]
    return int(seen)


@numba.njit(nogil=True)
def read_and_pack(x: Any, payload: Any, bits: Any) -> int:
    """Read every word of x, write the payload."""
    seen = np.uint32(0)
    for block in range(x.size // 1024):
        values = x[block * 1024 : (block + 1) * 1024]
        out = payload[block * 128 * bits : (block + 1) * 128 * bits]
        for i in range(1024):
            seen |= values[i]
        for i in range(out.size):
            out[i] = np.uint8(values[i])
    return int(seen)


@numba.njit(nogil=True)
def update(x: Any, memory: Any, fresh: Any, payload: Any, bits: Any) -> None:
    """Read x and the memory, write the memory and the payload."""
    for block in range(x.size // 1024):
        values = x[block * 1024 : (block + 1) * 1024]
        old, new = memory[block * 1024 :][:1024], fresh[block * 1024 :][:1024]
        out = payload[block * 128 * bits : (block + 1) * 128 * bits]
        for i in range(1024):
            new[i] = old[i] ^ np.uint16(values[i])
        for i in range(out.size):
            out[i] = np.uint8(values[i])


@numba.njit(nogil=True)
def unpack(payload: Any, out: Any, bits: Any) -> None:
    """Read the payload, write the values."""
    for block in range(out.size // 1024):
        source = payload[block * 128 * bits :][:128]
        for plane in range(8):
            target = out[block * 1024 + plane * 128 :][:128]
            for i in range(128):
                target[i] = np.uint32(source[i])


@numba.njit(nogil=True)
def apply(payload: Any, memory: Any, fresh: Any, out: Any, bits: Any) -> None:
    """Read the payload and the memory, write the memory and the values."""
    for block in range(out.size // 1024):
        source = payload[block * 128 * bits :][:128]
        for plane in range(8):
            start = block * 1024 + plane * 128
            old, new = memory[start:][:128], fresh[start:][:128]
            target = out[start:][:128]
            for i in range(128):
                new[i] = old[i] + np.uint16(source[i])
                target[i] = np.uint32(source[i])
