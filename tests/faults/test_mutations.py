"""Wrong bytes at every place of everything that hosts send each other: none is taken for true."""

import contextlib
import random
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.harness import format_table
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.links.frames import HEADER, Kind, Traffic
from thinpipe.launch.net.overlay.links.session import Session
from thinpipe.pipeline.wire.checksum import opened, sealed
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, ExchangeHeader
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError, Header

PAYLOAD_NBYTES = 64
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
Change = Callable[[bytearray], object]
Attempt = Callable[[Change], Literal["rejected", "ignored", "applied"]]
"""Sends a message that is changed on its way. Ignored: bits that no receiver uses."""


def messages(folder: Path) -> Iterator[tuple[str, int, Attempt]]:
    """Name, bytes and way of all that hosts send: through gloo, inside TLS, and its handshake."""
    key = folder / "mutations.key"
    keys.new(key)
    contexts = keys.contexts(key)
    for name, wire, check in _tensors():
        yield name, len(wire), partial(_tensor, wire, check)
    for kind in (Kind.BEAT, Kind.DATA):  # TLS does not look inside
        yield _flight(f"{kind.name} frame in TLS", contexts, _frame(kind), 4)
    for number, name in enumerate(("client's hello", "server's answer", "client's proof")):
        yield _flight(f"TLS handshake, {name}", contexts, b"hello", number)


def _flight(name: str, contexts: Contexts, frame: bytes, number: int) -> tuple[str, int, Attempt]:
    attempt, sizes = partial(_through_tls, contexts, frame, number), list[int]()
    attempt(lambda data: sizes.append(len(data)))
    return name, sizes[0], attempt


def test_no_changed_bit_is_taken_for_true(tmp_path: Path, option: Callable[[str], int]) -> None:
    rows = []
    for kind, nbytes, attempt in messages(tmp_path):
        found = {"rejected": 0, "ignored": 0, "applied": 0}
        chance = random.Random(kind)
        for number in range(option("flips")):
            place, bit = number % nbytes, chance.randrange(8)

            def flip(data: bytearray, place: int = place, bit: int = bit) -> None:
                data[place % len(data)] ^= 1 << bit  # a signature's length varies

            found[attempt(flip)] += 1
        assert not found["applied"], kind
        assert not found["ignored"] or "hello" in kind or "answer" in kind, kind
        rows.append([kind, str(nbytes), *map(str, found.values())])
    print(format_table(["message", "bytes", "rejected", "ignored", "taken for true"], rows))
    assert len(rows) == 8


def _tensor(wire: Tensor, check: Callable[[Tensor], bool], change: Change) -> str:
    data = bytearray(wire.numpy().tobytes())
    change(data)
    return "applied" if check(torch.frombuffer(data, dtype=torch.uint8)) else "rejected"


def _tensors() -> Iterator[tuple[str, Tensor, Callable[[Tensor], bool]]]:
    payload = torch.randint(0, 256, (PAYLOAD_NBYTES,), dtype=torch.uint8)
    header = Header(0, 16, 4, 0, 0, 6, 0, 0, PAYLOAD_NBYTES)
    message = torch.cat([torch.zeros(HEADER_NBYTES, dtype=torch.uint8), payload])
    header.write(message)
    yield "message over a cut", message, partial(_checked, header)
    exchange = ExchangeHeader(0, 16, 4, 7, 3, 1, 5, 0)
    message = torch.cat([torch.zeros(EXCHANGE_HEADER_NBYTES, dtype=torch.uint8), payload])
    exchange.write(message)
    yield "message between replicas", message, partial(_checked, exchange)
    yield "control vector", sealed(payload, 3), lambda found: opened(found, 3) is not None


def _checked(header: Header | ExchangeHeader, message: Tensor) -> bool:
    try:
        header.check(message)
    except DesyncError:
        return False
    return True


def _frame(kind: Kind) -> bytes:
    session = Session()
    if kind is Kind.BEAT:
        return bytes(session.beat(PAYLOAD_NBYTES))
    buffer = bytearray(HEADER.size) + random.Random(0).randbytes(PAYLOAD_NBYTES)
    return bytes(session.number(buffer, kind, Traffic.PIPELINE, 3))


def _through_tls(contexts: Contexts, frame: bytes, changed: int, change: Change) -> str:
    """A handshake and a frame, of whose flights one is changed; the frame must come as it was."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    from_server, from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = contexts[0].wrap_bio(to_server, from_server, server_side=True)
    client = contexts[1].wrap_bio(to_client, from_client)
    up, down = (from_client, to_server), (from_server, to_client)
    acts = 2 * [(client.do_handshake, *up), (server.do_handshake, *down)]
    acts += [(lambda: client.write(frame), *up)]
    try:
        for flight, (act, out, target) in enumerate(acts):
            with contextlib.suppress(ssl.SSLWantReadError):
                act()
            data = bytearray(out.read())
            if flight == changed:
                change(data)
            target.write(data)
        found = server.read(len(frame) + 1)
    except ssl.SSLError:
        return "rejected"
    return "ignored" if found == frame else "applied"
