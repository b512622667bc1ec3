"""Frames arrive once and in order, wherever connections break."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.launch.net.overlay.links.frames import (
    HEADER,
    LARGEST,
    FrameError,
    Header,
    Kind,
    Traffic,
    unpack,
)
from thinpipe.launch.net.overlay.links.session import Session


def frame(session: Session, number: int) -> bytes:
    buffer = bytearray(HEADER.size) + number.to_bytes(4, "big")
    return bytes(session.number(buffer, Kind.DATA, Traffic.PIPELINE, 3))


def deliver(session: Session, data: bytes, got: list[int]) -> None:
    header = unpack(data[: HEADER.size])
    session.accept(header)
    if header.number:
        got.append(int.from_bytes(data[HEADER.size :], "big"))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30))
def test_everything_arrives_once_and_in_order(rounds: list[tuple[int, int, bool]]) -> None:
    """In each round some frames are sent, some of those under way arrive, and it may break."""
    sender, receiver = Session(), Session()
    sent, got, way = 0, list[int](), list[bytes]()
    for new, arriving, breaks in rounds:
        for _ in range(new):
            sent += 1
            way.append(frame(sender, sent))
        for data in way[:arriving]:
            deliver(receiver, data, got)
        way = way[arriving:]
        if breaks:
            way = [bytes(data) for data in sender.resume(receiver.received)]
        elif arriving:
            deliver(sender, bytes(receiver.beat()), [])
    for data in way:
        deliver(receiver, data, got)
    assert got == list(range(1, sent + 1))
    sender.acknowledge(receiver.received)
    assert sender.unacknowledged_nbytes == 0


def test_a_gap_a_repetition_and_a_false_acknowledgement_are_errors() -> None:
    sender, receiver = Session(), Session()
    frames = [frame(sender, n) for n in range(3)]
    deliver(receiver, frames[0], [])
    for wrong in (frames[0], frames[2]):
        with pytest.raises(FrameError, match=r"frame \d after frame 1"):
            deliver(receiver, wrong, [])
    with pytest.raises(FrameError, match="acknowledgement of frame 4, after 3"):
        sender.acknowledge(4)
    sender.acknowledge(2)
    with pytest.raises(FrameError, match="has 1 frames, but acknowledged 2"):
        list(sender.resume(1))


def test_acknowledgements_are_owed_before_the_sender_keeps_much() -> None:
    sender, receiver = Session(), Session()
    for _ in range(4):
        assert not receiver.owes_acknowledgement
        buffer = bytearray(HEADER.size + LARGEST // 2)
        data = bytes(sender.number(buffer, Kind.DATA, Traffic.EXCHANGE, 1))
        receiver.accept(unpack(data[: HEADER.size]))
    assert receiver.owes_acknowledgement
    sender.accept(unpack(bytes(receiver.beat())))
    assert sender.unacknowledged_nbytes == 0
    assert not receiver.owes_acknowledgement


def test_headers_come_back_and_noise_is_rejected() -> None:
    header = Header(Kind.DATA, Traffic.EXCHANGE, 5, 77, 66, 1000)
    assert unpack(HEADER.pack(*header)) == header
    random_ = random.Random(1)
    accepted = 0
    for _ in range(2000):
        try:
            found = unpack(random_.randbytes(HEADER.size))
        except FrameError:
            continue
        accepted += 1
        assert found.length <= LARGEST
    assert accepted < 3


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.DATA, Traffic.CONTROL, 1, 0, 0, 10),  # has to be counted
        Header(Kind.BEAT, Traffic.CONTROL, 0, 1, 0, 0),  # is not counted
        Header(Kind.DATA, Traffic.CONTROL, 1, 1, 0, LARGEST + 1),
    ],
)
def test_frames_that_cannot_be_are_rejected(header: Header) -> None:
    with pytest.raises(FrameError):
        unpack(HEADER.pack(*header))
