"""Frames that two relays send each other inside TLS: a header and at most 128 KiB."""

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("!BBxxIQQI")
LARGEST = 128 * 1024
"""Bytes of a frame's payload; small enough that an urgent frame waits little behind another."""
_LARGEST_PEER_LIST = 1 << 20  # enough for thousands of hosts; seldom sent


class Kind(IntEnum):
    """The meaning of a frame to its stream, or to the link as a whole."""

    BEAT = 0  # the peer lives; carries an acknowledgement and perhaps padding. Has no number.
    OPEN = 1  # payload: the port to connect to
    DATA = 2
    CREDIT = 3  # payload: how many bytes more may be sent
    END = 4  # nothing more comes; the other direction continues
    RESET = 5  # the stream is broken
    PEER_LIST = 6  # payload: the hosts of the run, as JSON
    BYE = 7  # the host leaves the run in order


class Traffic(IntEnum):
    """Kinds of traffic, the most urgent first."""

    CONTROL = 0
    PIPELINE = 1
    EXCHANGE = 2
    JOINING = 3


class Header(NamedTuple):
    """`number` counts from 1 (0: not counted); `acknowledged` is the peer's last one here."""

    kind: Kind
    traffic: Traffic
    stream: int
    number: int
    acknowledged: int
    length: int


class FrameError(Exception):
    """The peer sent what no relay sends; the connection is of no use any more."""


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """A header, checked; FrameError if no frame begins so."""
    kind, traffic, stream, number, acknowledged, length = HEADER.unpack(data)
    try:
        header = Header(Kind(kind), Traffic(traffic), stream, number, acknowledged, length)
    except ValueError:
        raise FrameError(f"a frame of kind {kind} and priority {traffic}") from None
    most = _LARGEST_PEER_LIST if header.kind is Kind.PEER_LIST else LARGEST
    if length > most:
        raise FrameError(f"a frame of {length} bytes, where {most} are the most")
    if (number == 0) != (header.kind is Kind.BEAT):
        raise FrameError(f"a frame of kind {header.kind.name} with number {number}")
    return header
