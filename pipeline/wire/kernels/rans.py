"""Range asymmetric numeral systems (rANS): the bytes, and what `cpu/rans.py` works with.

Duda 2013 (arXiv 1311.2540); interleaved as in Giesen 2014 (arXiv 1402.3392). Symbol s of a model
has `freq` of 4096 slots, from `start` on. A state x, from 2^16 to below 2^32, takes a symbol in:

    if x >= freq * 2^20: put out the low 16 bits of x as a word, x >>= 16
    x = 4096 * (x // freq) + x % freq + start

and gives it back by the reverse, in which x % 4096 is a slot of the symbol.

Symbols are coded in blocks of 65536, the last of which may be shorter. Value i of a block belongs
to state i % 8; the encoder goes from the last value to the first, and the decoder reads words in
the reverse of the order in which they were put out: after value i if its state is below 2^16. All
states of block b begin, and must end in the decoder, as 2^16 + (257 b + sum of the block's symbols)
mod 2^16: so a damaged or misplaced block is noticed. All numbers are little endian:

    per block   2 bytes: how many words it has, 0xFFFF if it is stored
    per block   8 states of 4 bytes, then its words of 2 bytes, in the order in which they are read;
                stored: ceil(log2 S) planes of ceil(n / 8) bytes, plane p with bit p of each symbol,
                that of value i in bit i % 8 of byte i // 8

A block is stored unless it is shorter coded.
"""

from typing import NamedTuple

from torch import Tensor

PROBABILITY_BITS = 12  # costs within 0.2 % of a share's logarithm; a model has 4 KiB of slots
SLOTS = 1 << PROBABILITY_BITS
LOWEST = 1 << 16  # with states of 32 bits and words of 16, no symbol needs a second word
LANES = 8  # states in turn hide each other's latency; each is 4 bytes of every block
BLOCK = 1 << 16  # 34 bytes more than the words: 0.004 bits a value
STORED = 0xFFFF  # no coded block has so many words: stored it would be shorter
RECIPROCAL_BITS = 44  # with 43 some quotients are wrong, with 45 products leave 64 bits


class Lookup(NamedTuple):
    """Tables of K models of S symbols, S at most 32, in the forms that kernels need.

    `entry_KS` is freq * 2^16 + start, for 32 symbols whatever S is; `reciprocal_KS` is
    ceil(2^44 / freq), which makes (x * reciprocal) >> 44 the quotient of all x below freq * 2^20.
    """

    symbols: int
    entry_KS: Tensor  # int32
    reciprocal_KS: Tensor  # int64
    symbol_KM: Tensor  # uint8: whose slot it is


def stored_nbytes(numel: int, symbols: int) -> int:
    """Bytes of a stored block."""
    return (symbols - 1).bit_length() * -(-numel // 8)
