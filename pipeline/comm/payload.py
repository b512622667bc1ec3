"""Entropy coding of payloads whose rows of codes are known, with tables counted per message.

zstd's shortest code is a bit per byte of two 4-bit codes; rANS has no such limit. Each coded
payload has tables of its own, so first visits and changes are described apart and nothing needs to
be remembered. In place of a payload's parts, little endian:

    scales      of all rows, as they are; of rows without codes, the rows
    streams     of a part's codes: all low halves of its bytes, then all high halves; at 8 bits,
                where halves are not alike, they are two streams

and a stream is its length (4 bytes, without what precedes it), the table of 16 symbols (2 bytes
each) and what `pipeline/wire/coding/rans.py` writes.

Axes: B rows, W bytes of a row, N half bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import Coding, CodingError, compress, expand
from thinpipe.pipeline.wire.uniform import Uniform

NUMBERS: Mapping[Coding, int] = {"none": 0, "zstd": 1, "rans": 2}
"""Facts from the header."""
_SYMBOLS, _LENGTH = 16, torch.int32
_TABLE_NBYTES, _LENGTH_NBYTES = 2 * _SYMBOLS, 4


class Rows(NamedTuple):
    """Rows that one codec wrote: of `nbytes` bytes each, which are codes from `split` on."""

    samples: int
    nbytes: int
    split: int
    bits: int

    @property
    def streams(self) -> int:
        if not self.samples or self.split == self.nbytes:
            return 0
        return 2 if self.bits == 8 else 1


def rows_of(codec: object, samples: int, nbytes: int, numel: int) -> Rows:
    """Rows of `numel` values; of codecs other than `Uniform` nothing is known."""
    if isinstance(codec, Uniform):
        return Rows(samples, nbytes, codec.scale_nbytes(numel), codec.bits)
    return Rows(samples, nbytes, nbytes, 8)


def compress_payload(
    number: int, payload: Tensor, coded: Tensor, rows: Sequence[Rows]
) -> int | None:
    """Write a payload's coded form to the start of `coded` and return its length.

    None, with `coded` untouched, if it would not be shorter. Both are uint8 on the CPU.
    """
    if number == 1:
        return compress(payload, coded)
    streams = any(part.streams for part in rows)
    return compress_codes(payload, coded, rows) if streams else None


def expand_payload(number: int, coded: Tensor, payload: Tensor, rows: Sequence[Rows]) -> None:
    """Fill `payload` from its coded form.

    Raises:
        CodingError: the bytes are damaged, or those of other rows.
    """
    if number == 1:
        expand(coded, payload)
    else:
        expand_codes(coded, payload, rows)


def compress_codes(payload: Tensor, coded: Tensor, rows: Sequence[Rows]) -> int | None:
    """Write a shorter form of `payload` to the start of `coded` and return its length.

    None, with `coded` untouched, if it would not be shorter. Both are uint8 on the CPU.
    """
    parts = list(_parts(payload, rows))
    pieces = [head_BW.flatten() for head_BW, _ in parts]
    for part, (_, codes_BW) in zip(rows, parts, strict=True):
        if part.streams:
            flat = codes_BW.flatten()
            halves_N = torch.cat([flat & 15, flat >> 4])
            pieces += [_stream(symbol_N) for symbol_N in halves_N.chunk(part.streams)]
    message = torch.cat(pieces)
    if len(message) >= payload.numel():
        return None
    coded[: len(message)] = message
    return len(message)


def expand_codes(coded: Tensor, payload: Tensor, rows: Sequence[Rows]) -> None:
    """Fill `payload` from what `compress_codes` wrote.

    Raises:
        CodingError: the bytes are damaged, or those of other rows.
    """
    parts = list(_parts(payload, rows))
    for head_BW, _ in parts:
        head, coded = _taken(coded, head_BW.numel())
        head_BW.copy_(head.view(head_BW.shape))
    for part, (_, codes_BW) in zip(rows, parts, strict=True):
        if part.streams:
            halves_N = torch.empty(2 * codes_BW.numel(), dtype=torch.uint8)
            for symbol_N in halves_N.chunk(part.streams):
                coded = _read_stream(coded, symbol_N)
            low, high = halves_N.chunk(2)
            codes_BW.copy_((low | high << 4).view(codes_BW.shape))
    if coded.numel():
        raise CodingError(f"a coded payload has {coded.numel()} bytes after its end")


def _parts(payload: Tensor, rows: Sequence[Rows]) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and codes of each part, as views."""
    sizes = [part.samples * part.nbytes for part in rows]
    for part, row_bytes in zip(rows, torch.split(payload, sizes), strict=True):
        row_BW = row_bytes.view(part.samples, part.nbytes)
        yield row_BW[:, : part.split], row_BW[:, part.split :]


def _stream(symbol_N: Tensor) -> Tensor:
    tables = rans.counted(symbol_N, _SYMBOLS)
    first = _LENGTH_NBYTES + _TABLE_NBYTES
    wire = torch.empty(first + rans.capacity(symbol_N.numel(), _SYMBOLS), dtype=torch.uint8)
    length = rans.encode(symbol_N, None, tables, wire[first:])
    wire[:_LENGTH_NBYTES] = torch.tensor([length], dtype=_LENGTH).view(torch.uint8)
    wire[_LENGTH_NBYTES:first] = tables.packed()
    return wire[: first + length]


def _read_stream(coded: Tensor, symbol_N: Tensor) -> Tensor:
    """Fill `symbol_N`; returns what comes after the stream."""
    head, coded = _taken(coded, _LENGTH_NBYTES)
    table, coded = _taken(coded, _TABLE_NBYTES)
    wire, coded = _taken(coded, int(head.clone().view(_LENGTH)))
    rans.decode(wire, None, rans.unpacked(table, _SYMBOLS), symbol_N)
    return coded


def _taken(coded: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
    """The first bytes and the rest."""
    if not 0 <= nbytes <= coded.numel():
        raise CodingError(f"a coded payload has {coded.numel()} bytes where {nbytes} are needed")
    return coded[:nbytes], coded[nbytes:]
