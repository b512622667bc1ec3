"""Wrong bytes at every place of everything that hosts send each other: none is taken for true."""

import contextlib
import random
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.launch.overlay import keys
from thinpipe.launch.overlay.links.frames import HEADER, Kind, Traffic
from thinpipe.launch.overlay.links.session import Session
from thinpipe.pipeline.wire.checksum import opened, sealed
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, ExchangeHeader
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError, Header

PER_KIND = 4000
_PAYLOAD_NBYTES = 64


@dataclass(frozen=True)
class Mutated:
    """How many wrong copies of one kind of message there were; `applied` were taken for true.

    `changed_nothing`: bits that no receiver uses.
    """

    kind: str
    nbytes: int
    mutations: int
    refused: int
    changed_nothing: int
    applied: int


def mutations(folder: Path) -> Iterator[Mutated]:
    """Every kind of frame inside TLS, the handshake, and the messages that gloo carries."""
    key = folder / "mutations.key"
    keys.new(key)
    contexts = keys.contexts(key)
    for name, wire, check in _messages():
        yield _mutate(name, wire, check)
    for kind in Kind:
        frame = _frame(kind)
        size = len(_Tls(contexts).encrypt(frame))
        yield _count(f"{kind.name} frame in TLS", size, partial(_through_tls, contexts, frame))
    for number, name in enumerate(("client's hello", "server's answer", "client's proof")):
        sizes: list[int] = []

        def measure(data: bytearray, sizes: list[int] = sizes) -> None:
            sizes.append(len(data))

        _shake_hands(contexts, number, measure)
        yield _count(f"TLS handshake, {name}", sizes[0], partial(_shake_hands, contexts, number))


Change = Callable[[bytearray], object]


def _count(kind: str, nbytes: int, attempt: Callable[[Change], str]) -> Mutated:
    found = {"refused": 0, "nothing": 0, "applied": 0}
    generator = random.Random(kind)
    for number in range(PER_KIND):
        place, bit = number % nbytes, generator.randrange(8)

        def change(data: bytearray, place: int = place, bit: int = bit) -> None:
            data[place % len(data)] ^= 1 << bit  # a signature's length varies

        found[attempt(change)] += 1
    return Mutated(kind, nbytes, PER_KIND, found["refused"], found["nothing"], found["applied"])


def _mutate(kind: str, wire: Tensor, check: Callable[[Tensor], bool]) -> Mutated:
    def attempt(change: Change) -> str:
        data = bytearray(wire.numpy().tobytes())
        change(data)
        return "applied" if check(torch.frombuffer(data, dtype=torch.uint8)) else "refused"

    return _count(kind, len(wire), attempt)


def _messages() -> Iterator[tuple[str, Tensor, Callable[[Tensor], bool]]]:
    payload = torch.randint(0, 256, (_PAYLOAD_NBYTES,), dtype=torch.uint8)
    header = Header(0, 16, 4, 0, 0, 6, 0, 0, _PAYLOAD_NBYTES)
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
        return bytes(session.beat(_PAYLOAD_NBYTES))
    buffer = bytearray(HEADER.size) + random.Random(0).randbytes(_PAYLOAD_NBYTES)
    return bytes(session.number(buffer, kind, Traffic.PIPELINE, 3))


class _Tls:
    """Two ends in memory, connected."""

    def __init__(self, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
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


def _through_tls(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], frame: bytes, change: Change
) -> str:
    tls = _Tls(contexts)
    record = bytearray(tls.encrypt(frame))
    change(record)
    tls.to_server.write(record)
    try:
        found = tls.server.read(len(frame) + 1)
    except ssl.SSLError:
        return "refused"
    return "nothing" if found == frame else "applied"


def _shake_hands(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], number: int, change: Change
) -> str:
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
        return "refused"
    return "nothing" if found == said else "applied"
