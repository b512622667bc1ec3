"""The header of a message over a cut, and the error when two ends disagree.

gloo takes a message shorter than the posted receive without a word and ends the process on a
longer one; receives are therefore posted for the longest message there can be, and this header,
which holds the length that was meant, is checked before a byte is used. 52 bytes, little endian:

    offset  bytes  field
    0       4      magic "TPW2"
    4       1      direction: 0 forward, 1 backward
    5       1      codec id
    6       1      bits per value
    7       1      reserved: 0
    8       8      run id
    16      8      step
    24      4      cut: index of the first layer after it
    28      4      microbatch
    32      4      CRC-32 of the sample ids (int64, little endian)
    36      4      low half of the payload's XXH3-64
    40      8      length of the payload in bytes
    48      4      CRC-32 of what the sender remembers of the samples; 0 without a memory
"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from thinpipe.pipeline.wire.told import DIRECTIONS


class DesyncError(RuntimeError):
    """Two ends of a link disagree about a message: the state of one of them is not as it should."""


class Layout(NamedTuple):
    """The bytes of one kind of header: its magic, then fields in order, `payload_hash` included."""

    magic: bytes
    packing: struct.Struct
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.packing.size

    def write(self, message: Tensor, fields: Mapping[str, int]) -> None:
        """Fill the header of `message` (uint8: header, then payload) from the payload it holds."""
        fields = {**fields, "payload_hash": self._payload_hash(message)}
        packed = self.packing.pack(self.magic, *(fields[name] for name in self.names))
        message[: self.nbytes] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def read(self, message: Tensor) -> dict[str, int]:
        """The fields of a message; nothing has been checked yet."""
        values = self.packing.unpack(bytes(message[: self.nbytes].numpy()))[1:]
        return dict(zip(self.names, values, strict=True))

    def check(
        self, message: Tensor, expected: Mapping[str, int], place: str, words: Mapping[str, str]
    ) -> None:
        """Compare a message with what this end expects; `words` are for fields in errors.

        Raises:
            DesyncError: naming the place and each field that differs, with both sides' values.
        """
        magic = bytes(message[: len(self.magic)].numpy())
        if magic != self.magic:
            raise DesyncError(f"{place}: not a ThinPipe message (magic {magic!r})")
        sent = self.read(message)
        wrong = [
            f"{words.get(name, name)}: peer sent {sent[name]}, expected {value}"
            for name, value in expected.items()
            if sent[name] != value
        ]
        if not wrong and self._payload_hash(message) != sent["payload_hash"]:
            wrong = ["payload: its checksum differs from the header's, bytes were damaged"]
        if wrong:
            raise DesyncError(f"{place}: the two ends disagree; " + "; ".join(wrong))

    def _payload_hash(self, message: Tensor) -> int:
        """XXH3 takes a tenth of the time of CRC-32, which showed in the step on fast links."""
        return xxhash.xxh3_64_intdigest(message[self.nbytes :].numpy().data) & 0xFFFFFFFF


_LAYOUT = Layout(
    b"TPW2",
    struct.Struct("<4sBBBBQQIIIIQI"),
    (
        *("direction", "codec_id", "bits", "reserved", "run_id", "step", "cut", "microbatch"),
        *("ids_crc", "payload_hash", "length", "memory_crc"),
    ),
)

HEADER_NBYTES = _LAYOUT.nbytes


@dataclass(frozen=True)
class Header:
    """What a message is; both ends compute all but the payload's hash alike."""

    direction: int
    codec_id: int
    bits: int
    run_id: int
    step: int
    cut: int
    microbatch: int
    ids_crc: int
    length: int
    memory_crc: int = 0
    reserved: int = 0

    def write(self, message: Tensor) -> None:
        _LAYOUT.write(message, vars(self))

    def check(self, message: Tensor) -> None:
        """Compare the header of a received message with what this end expects.

        Raises:
            DesyncError: naming each field that differs, with both sides' values.
        """
        direction = DIRECTIONS[self.direction]
        place = f"cut {self.cut} {direction}, step {self.step}, microbatch {self.microbatch}"
        _LAYOUT.check(message, vars(self), place, words={})


def payload_length(message: Tensor) -> int:
    """The length of a message's payload, as its header says; nothing has been checked yet."""
    return _LAYOUT.read(message)["length"]


def crc32(values: Tensor, start: int = 0) -> int:
    """CRC-32 of a CPU tensor's bytes, going on from `start`, the CRC of what comes before them."""
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data, start)
