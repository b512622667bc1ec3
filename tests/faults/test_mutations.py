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
        frame = _frame(kind)
        size = len(_Tls(contexts).encrypt(frame))
        yield f"{kind.name} frame in TLS", size, partial(_through_tls, contexts, frame)
    for number, name in enumerate(("client's hello", "server's answer", "client's proof")):
        sizes: list[int] = []
        _shake_hands(contexts, number, lambda data, sizes=sizes: sizes.append(len(data)))
        yield f"TLS handshake, {name}", sizes[0], partial(_shake_hands, contexts, number)


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
    yield "message over a cut", message, lambda found: _checked(header, found)
    exchange = ExchangeHeader(0, 16, 4, 7, 3, 1, 5, 0)
    message = torch.cat([torch.zeros(EXCHANGE_HEADER_NBYTES, dtype=torch.uint8), payload])
    exchange.write(message)
    yield "message between replicas", message, lambda found: _checked(exchange, found)
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


class _Tls:
    """Two ends in memory, connected."""

    def __init__(self, contexts: Contexts) -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = contexts[0].wrap_bio(to_server, to_client, server_side=True)
        self.client = contexts[1].wrap_bio(to_client, to_server)
        for end in (self.client, self.server, self.client, self.server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        self.to_server = to_server

    def encrypt(self, data: bytes) -> bytes:
        self.client.write(data)
        return self.to_server.read()


def _through_tls(contexts: Contexts, frame: bytes, change: Change) -> str:
    tls = _Tls(contexts)
    record = bytearray(tls.encrypt(frame))
    change(record)
    tls.to_server.write(record)
    try:
        found = tls.server.read(len(frame) + 1)
    except ssl.SSLError:
        return "rejected"
    return "ignored" if found == frame else "applied"


def _shake_hands(contexts: Contexts, number: int, change: Change) -> str:
    """A handshake in which flight `number` is changed; then a message must come as it was sent."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    from_server, from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = contexts[0].wrap_bio(to_server, from_server, server_side=True)
    client = contexts[1].wrap_bio(to_client, from_client)
    said, flight = b"hello", 0
    try:
        for end, out, target in 2 * (
            (client, from_client, to_server),
            (server, from_server, to_client),
        ):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            data = bytearray(out.read())
            if flight == number:
                change(data)
            flight += 1
            target.write(data)
        client.write(said)
        to_server.write(from_client.read())
        found = server.read(len(said) + 1)
    except ssl.SSLError:
        return "rejected"
    return "ignored" if found == said else "applied"
