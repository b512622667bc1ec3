"""The fixed header of every message, and the error when two ends disagree.

gloo takes a message shorter than the posted receive without a word and ends the process on a
longer one; receives are therefore posted for the longest message there can be, and this header,
which tells the length that was meant, is checked before a byte is used. 52 bytes, little endian:

    offset  bytes  field
    0       4      magic "TPW2"
    4       1      direction: 0 forward, 1 backward
    5       1      codec id
    6       1      bits per value
    7       1      coding of the payload: 0 none, 1 zstd
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
from dataclasses import asdict, dataclass

import torch
import xxhash
from torch import Tensor

HEADER_NBYTES = 52

_LAYOUT = struct.Struct("<4sBBBBQQIIIIQI")
_MAGIC = b"TPW2"
_NAMES = (
    *("direction", "codec_id", "bits", "coding", "run_id", "step", "cut", "microbatch", "ids_crc"),
    *("payload_hash", "length", "memory_crc"),
)
FORWARD, BACKWARD = 0, 1
DIRECTIONS = ("forward", "backward")


class DesyncError(RuntimeError):
    """Two ends of a link disagree about a message: the state of one of them is not as it should."""


@dataclass(frozen=True)
class Header:
    """What a message says about itself; both ends compute all but the payload's hash alike."""

    direction: int
    codec_id: int
    bits: int
    run_id: int
    step: int
    cut: int
    microbatch: int
    ids_crc: int
    length: int
    coding: int = 0
    memory_crc: int = 0

    def write(self, message: Tensor) -> None:
        """Fill the header of `message` (uint8: header, then payload) from the payload it holds."""
        packed = _LAYOUT.pack(
            _MAGIC,
            self.direction,
            self.codec_id,
            self.bits,
            self.coding,
            self.run_id,
            self.step,
            self.cut,
            self.microbatch,
            self.ids_crc,
            _payload_hash(message),
            self.length,
            self.memory_crc,
        )
        message[:HEADER_NBYTES] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def check(self, message: Tensor) -> None:
        """Compare the header of a received message with what this end expects.

        Raises:
            DesyncError: naming each field that differs, with both sides' values.
        """
        fields = _LAYOUT.unpack(bytes(message[:HEADER_NBYTES].numpy()))
        if fields[0] != _MAGIC:
            raise DesyncError(f"{self._place()}: not a ThinPipe message (magic {fields[0]!r})")
        got = dict(zip(_NAMES, fields[1:], strict=True))
        wrong = [
            f"{name}: peer sent {got[name]}, expected {value}"
            for name, value in asdict(self).items()
            if got[name] != value
        ]
        if not wrong and _payload_hash(message) != got["payload_hash"]:
            wrong = ["payload: its checksum differs from the header's, bytes were damaged"]
        if wrong:
            raise DesyncError(f"{self._place()}: the two ends disagree; " + "; ".join(wrong))

    def _place(self) -> str:
        direction = DIRECTIONS[self.direction]
        return f"cut {self.cut} {direction}, step {self.step}, microbatch {self.microbatch}"


def coding_and_length(message: Tensor) -> tuple[int, int]:
    """What a message says about the form of its payload; nothing has been checked yet."""
    got = dict(zip(_NAMES, _LAYOUT.unpack(bytes(message[:HEADER_NBYTES].numpy()))[1:], strict=True))
    return got["coding"], got["length"]


def crc32(values: Tensor, start: int = 0) -> int:
    """CRC-32 of a CPU tensor's bytes, going on from `start`, the CRC of what comes before them."""
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data, start)


def _payload_hash(message: Tensor) -> int:
    """XXH3 takes a tenth of the time of CRC-32, which showed in the step on fast links."""
    return xxhash.xxh3_64_intdigest(message[HEADER_NBYTES:].numpy().data) & 0xFFFFFFFF
