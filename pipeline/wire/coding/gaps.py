"""A sparse mask as bytes: how far it is from one marked place to the next.

zstd, which spends at least one bit on each byte of a mask, comes close to the entropy of masks that
mark a fifth; of those that mark a hundredth it takes half as much again as this. A coded mask holds

    count      how many symbols there are, a little-endian 32-bit number
    table      `rans.Tables.packed`: how often each of the 32 symbols comes
    symbols    of every gap its high part, coded by `rans`; 31 says "31, and more"
    low bits   of every gap, `_shift` bits each

A gap is the number of places that are skipped. Its low bits are as good as random: not coded.

Axes: k marked places, M mask bytes, C symbols.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import CodingError

_SYMBOLS = 32  # the most that rANS takes; high parts from 31 on take several
_MORE = _SYMBOLS - 1
_COUNT_NBYTES, _TABLE_NBYTES = 4, 2 * _SYMBOLS
_Ints = npt.NDArray[np.int64]


def encode(mask_M: Tensor, wire: Tensor) -> int | None:
    """Write the mask (uint8, place i is bit i) to the start of `wire` and return the length.

    None, with `wire` untouched, if it would not be shorter than the mask.
    """
    places_k = np.flatnonzero(np.unpackbits(mask_M.numpy(), bitorder="little").view(np.bool_))
    if not len(places_k):
        return None
    shift = _shift(8 * mask_M.numel(), len(places_k))
    gap_k = np.diff(places_k, prepend=-1) - 1
    high_k = gap_k >> shift
    symbol_C = np.full(int((high_k // _MORE).sum()) + len(high_k), _MORE, np.uint8)
    symbol_C[np.cumsum(high_k // _MORE + 1) - 1] = high_k % _MORE
    symbols = torch.from_numpy(symbol_C)
    tables = rans.counted(symbols, _SYMBOLS)
    coded = torch.empty(rans.capacity(symbols.numel(), _SYMBOLS), dtype=torch.uint8)
    parts = [
        torch.tensor([symbols.numel()], dtype=torch.int32).view(torch.uint8),
        tables.packed(),
        coded[: rans.encode(symbols, None, tables, coded)],
        _packed(gap_k, shift),
    ]
    length = sum(part.numel() for part in parts)
    if length >= mask_M.numel():
        return None
    wire[:length] = torch.cat(parts)
    return length


def decode(wire: Tensor, marked: int, mask_M: Tensor) -> None:
    """Fill `mask_M` from what `encode` made of a mask with so many marked places.

    Raises:
        CodingError: the bytes are damaged, or those of another mask.
    """
    places = 8 * mask_M.numel()
    shift = _shift(places, marked)
    low_nbytes = -(-marked * shift // 8)
    head, end = _COUNT_NBYTES + _TABLE_NBYTES, wire.numel() - low_nbytes
    if end < head:
        raise CodingError(f"a mask in {wire.numel()} bytes: {marked} gaps take more")
    count = int(wire[:_COUNT_NBYTES].clone().view(torch.int32))
    if not marked <= count <= marked + places // (_MORE << shift):  # before memory is taken for it
        raise CodingError(f"a mask of {places} places has {count} symbols for {marked} gaps")
    symbols = torch.empty(count, dtype=torch.uint8)
    tables = rans.unpacked(wire[_COUNT_NBYTES:head], _SYMBOLS)
    rans.decode(wire[head:end], None, tables, symbols)
    symbol_C = symbols.numpy()
    (last_k,) = np.nonzero(symbol_C != _MORE)
    if len(last_k) != marked or last_k[-1] != count - 1:
        raise CodingError(f"a mask of {places} places has {len(last_k)} gaps, expected {marked}")
    high_k = np.diff(np.cumsum(symbol_C, dtype=np.int64)[last_k], prepend=0)
    place_k = np.cumsum((high_k << shift) + _unpacked(wire[end:], marked, shift) + 1) - 1
    if place_k[-1] >= places:
        raise CodingError(f"a mask of {places} places marks place {place_k[-1]}")
    bits = np.zeros(places, np.uint8)
    bits[place_k] = 1
    mask_M.copy_(torch.from_numpy(np.packbits(bits, bitorder="little")))


def _shift(places: int, marked: int) -> int:
    """Low bits of a gap: so many that high parts are 4 to 8 on average."""
    return max(0, (places // marked).bit_length() - 3)


def _packed(gap_k: _Ints, shift: int) -> Tensor:
    bits_kS = (gap_k[:, None] >> np.arange(shift)) & 1
    return torch.from_numpy(np.packbits(bits_kS.astype(np.uint8), bitorder="little"))


def _unpacked(wire: Tensor, marked: int, shift: int) -> _Ints:
    bits = np.unpackbits(wire.numpy(), count=marked * shift, bitorder="little")
    low_k: _Ints = bits.reshape(marked, shift).astype(np.int64) @ (1 << np.arange(shift))
    return low_k
