"""Entropy coding with tables that both ends know: rANS, which reaches below 1 bit per value.

A table gives each symbol a share of 4096, and the cost of a symbol is within 0.2 % of the logarithm
of its share (1.2 % at 0.25 bits a value); to that come 34 bytes per block of 65536 values. Each
value may have a table of its own, for which both ends must know beforehand what the value will look
like. Bytes and algorithm are in `kernels/rans.py`.

Axes: N values, K models (tables), S symbols.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.rans import (
    BLOCK,
    PROBABILITY_BITS,
    RECIPROCAL_BITS,
    SLOTS,
    Lookup,
    stored_nbytes,
)

__all__ = ["PROBABILITY_BITS", "Tables", "capacity", "counted", "decode", "encode", "unpacked"]

MOST_MODELS, MOST_SYMBOLS = 128, 32  # 512 KiB of slots; 5 bits of an entry's index in kernels


@dataclass(frozen=True, eq=False)
class Tables:
    """Models by the frequencies of their symbols, which add up to 4096; none may be 0.

    Raises:
        ValueError: frequencies that are no such numbers, over 128 models or over 32 symbols.
    """

    freq_KS: Tensor

    def __post_init__(self) -> None:
        freq_KS = self.freq_KS
        if freq_KS.ndim != 2 or freq_KS.is_floating_point() or freq_KS.is_complex():
            raise ValueError(f"frequencies {tuple(freq_KS.shape)} of {freq_KS.dtype}: use integers")
        if not (1 <= len(freq_KS) <= MOST_MODELS and 1 <= self.symbols <= MOST_SYMBOLS):
            raise ValueError(
                f"frequencies of {len(freq_KS)} models and {self.symbols} symbols: "
                f"use 1 to {MOST_MODELS} and 1 to {MOST_SYMBOLS}"
            )
        freq_KS = freq_KS.to("cpu", torch.int64, copy=True)  # the lookup is made later
        if int(freq_KS.min()) < 1 or int(freq_KS.max()) > SLOTS:
            raise ValueError(f"frequencies {int(freq_KS.min())} to {int(freq_KS.max())}: use >= 1")
        if (freq_KS.sum(1) != SLOTS).any():
            raise ValueError(f"frequencies add up to {freq_KS.sum(1).tolist()}, expected {SLOTS}")
        object.__setattr__(self, "freq_KS", freq_KS)

    @property
    def symbols(self) -> int:
        return self.freq_KS.shape[1]

    @cached_property
    def lookup(self) -> Lookup:
        freq_KS = self.freq_KS.numpy()  # tables may be counted for every message: numpy is quick
        models, symbols = freq_KS.shape
        entry_KS = np.zeros((models, MOST_SYMBOLS), np.int32)
        entry_KS[:, :symbols] = freq_KS << 16 | (freq_KS.cumsum(1) - freq_KS)
        reciprocal_KS = np.zeros((models, MOST_SYMBOLS), np.int64)
        reciprocal_KS[:, :symbols] = ((1 << RECIPROCAL_BITS) + freq_KS - 1) // freq_KS  # rounded up
        symbol = np.tile(np.arange(symbols, dtype=np.uint8), models)
        symbol_KM = np.repeat(symbol, freq_KS.ravel()).reshape(models, SLOTS)
        return Lookup(symbols, *map(torch.from_numpy, (entry_KS, reciprocal_KS, symbol_KM)))

    def packed(self) -> Tensor:
        """The frequencies as bytes: two each, little endian."""
        return self.freq_KS.to(torch.int16).view(torch.uint8).flatten()


def unpacked(wire: Tensor, symbols: int) -> Tables:
    """The tables whose `packed` form fills `wire`.

    Raises:
        CodingError: it is no such form.
    """
    try:
        return Tables(wire.clone().view(torch.int16).view(-1, symbols))  # aligned; 4096 fits int16
    except (ValueError, RuntimeError) as error:
        raise CodingError(f"a table in {wire.numel()} bytes: {error}") from error


def capacity(count: int, symbols: int = MOST_SYMBOLS) -> int:
    """Most bytes that `encode` writes for `count` symbols of so many kinds."""
    full, rest = divmod(count, BLOCK)
    nbytes = full * (2 + stored_nbytes(BLOCK, symbols))
    return nbytes + 2 + stored_nbytes(rest, symbols) if rest else nbytes


def encode(symbol_N: Tensor, model_N: Tensor | None, tables: Tables, wire: Tensor) -> int:
    """Write the symbols to the start of `wire` and return how many bytes they take.

    `model_N` tells which table each symbol is coded with; None is the first one for all. All
    tensors are uint8, on the CPU.

    Raises:
        ValueError: a symbol or model that the tables do not have, or not `capacity` bytes.
    """
    needed = capacity(symbol_N.numel(), tables.symbols)
    if wire.numel() < needed:
        raise ValueError(f"{wire.numel()} bytes: {symbol_N.numel()} symbols can take {needed}")
    _check(symbol_N, tables.symbols, "symbol")
    model_N = _checked_models(model_N, symbol_N.numel(), tables)
    return int(load("rans", "numba").encode(symbol_N.contiguous(), model_N, tables.lookup, wire))


def decode(wire: Tensor, model_N: Tensor | None, tables: Tables, symbol_N: Tensor) -> None:
    """Write to `symbol_N` what `encode` made these bytes of, no fewer and no more.

    Raises:
        ValueError: a model that the tables do not have.
        CodingError: the bytes are damaged, or those of other tables, or of another number of
            symbols; `symbol_N` may be overwritten.
    """
    model_N = _checked_models(model_N, symbol_N.numel(), tables)
    into_N = symbol_N.contiguous()
    if not load("rans", "numba").decode(wire.contiguous(), model_N, tables.lookup, into_N):
        raise CodingError(f"{wire.numel()} bytes do not decode to {symbol_N.numel()} symbols")
    if into_N is not symbol_N:  # it was not contiguous
        symbol_N.copy_(into_N)


def counted(symbol_N: Tensor, symbols: int) -> Tables:
    """One table for what `symbol_N` (uint8) holds: shares as they occur, but none is 0."""
    _check(symbol_N, symbols, "symbol")
    count_S = torch.zeros(symbols, dtype=torch.int64)
    load("rans", "numba").count(symbol_N.contiguous(), count_S)
    return Tables(apportioned(count_S)[None])


def apportioned(count_S: Tensor) -> Tensor:
    """Frequencies that add up to 4096, none of them 0, close to proportional to the counts.

    What rounding leaves over goes where a unit shortens the message most. Integers throughout, so
    equal counts give equal frequencies anywhere.
    """
    counts = count_S.tolist()
    total, symbols = max(sum(counts), 1), range(len(counts))
    freqs = [max(1, count * SLOTS // total) for count in counts]
    for _ in range(SLOTS - sum(freqs)):
        freqs[max(symbols, key=lambda s: counts[s] * SLOTS // (2 * freqs[s] + 1))] += 1
    for _ in range(sum(freqs) - SLOTS):
        larger = [s for s in symbols if freqs[s] > 1]
        freqs[min(larger, key=lambda s: counts[s] * SLOTS // (2 * freqs[s] - 1))] -= 1
    return torch.tensor(freqs)


def _check(value_N: Tensor, below: int, name: str) -> None:
    """Compiled code would read past the end of a table."""
    if value_N.dtype != torch.uint8:
        raise ValueError(f"{name}s of {value_N.dtype}: use torch.uint8")
    if value_N.numel() and int(value_N.max()) >= below:
        raise ValueError(f"{name} {int(value_N.max())}: the tables have {below}")


def _checked_models(model_N: Tensor | None, numel: int, tables: Tables) -> Tensor | None:
    if model_N is None:
        return None
    if model_N.numel() != numel:
        raise ValueError(f"{model_N.numel()} models for {numel} symbols")
    _check(model_N, len(tables.freq_KS), "model")
    return model_N.contiguous()
