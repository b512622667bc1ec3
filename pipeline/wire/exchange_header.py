"""The header of a message between the replicas of a stage. 48 bytes, little endian:

    offset  bytes  field
    0       4      magic "TPX1"
    4       1      phase: 0 to the server of a shard, 1 from it
    5       1      codec id
    6       1      bits per value
    7       1      0
    8       8      run id
    16      8      step: number of the exchange
    24      4      bucket
    28      4      sender: the replica that sent it
    32      4      digest of what else the replicas must have in common; 0 without
    36      4      low half of the payload's XXH3-64
    40      8      length of the payload in bytes

Its magic differs from that of messages over a cut (`header.py`): neither is taken for the other.
"""

import struct
from dataclasses import dataclass

from torch import Tensor

from thinpipe.pipeline.wire.header import Layout

TO_SERVER, FROM_SERVER = 0, 1

_LAYOUT = Layout(
    b"TPX1",
    struct.Struct("<4sBBBBQQIIIIQ"),
    (
        *("phase", "codec_id", "bits", "unused", "run_id", "step", "bucket", "sender", "digest"),
        *("payload_hash", "length"),
    ),
)
_WORDS = {
    "phase": "phase (0 to the server, 1 from it)",
    "codec_id": "codec id",
    "bits": "bits per value",
    "run_id": "run id",
    "step": "exchange",
    "sender": "sending replica",
    "digest": "digest of the global model",
    "length": "payload length",
}

EXCHANGE_HEADER_NBYTES = _LAYOUT.nbytes


@dataclass(frozen=True)
class ExchangeHeader:
    """What a message between replicas is. Its length is that of the message, as codecs may vary."""

    phase: int
    codec_id: int
    bits: int
    step: int
    bucket: int
    sender: int
    digest: int = 0
    run_id: int = 0

    def write(self, message: Tensor) -> None:
        _LAYOUT.write(message, self._fields(message))

    def check(self, message: Tensor) -> None:
        """Compare the header of a received message with what this replica expects.

        Raises:
            DesyncError: naming exchange, bucket, replica and each field that differs.
        """
        phase = ("message to the server", "answer of the server")[self.phase]
        place = f"exchange {self.step}, bucket {self.bucket}, {phase} from replica {self.sender}"
        _LAYOUT.check(message, self._fields(message), place, _WORDS)

    def _fields(self, message: Tensor) -> dict[str, int]:
        return {**vars(self), "unused": 0, "length": message.numel() - EXCHANGE_HEADER_NBYTES}


def payload_nbytes(message: Tensor) -> int:
    """The payload's length as the header has it; nothing has been checked yet.

    The start of a message is enough.
    """
    return _LAYOUT.read(message)["length"]
