"""How a connection between two hosts begins: TCP, TLS 1.3, then a message each way."""

import errno
import os
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, Field, StringConstraints, ValidationError

from thinpipe.launch.host.interfaces import family_of
from thinpipe.launch.net.overlay.links.loop import READ, WRITE, Steps
from thinpipe.launch.net.overlay.links.tcp import Segments, tune

LIMIT_S = 5.0
"""A connection that is not established after that is closed."""
RUN_NAME = "thinpipe run"
"""In the certificate of a key that all machines of a run share."""
_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 20  # as in frames.py, a list of thousands of hosts; of peers with the key only
_Model = TypeVar("_Model", bound=BaseModel)

Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,63}$")]
_Port = Annotated[int, Field(ge=0, le=65535)]


class Hello(BaseModel, frozen=True, extra="forbid", strict=True):
    """The connecting host's first message.

    "join": it wants to be part of the run, and listens at `port`. "probe": nothing, it looks
    whether this host can be reached. "link": it carries the frames of `session` to host `to`, of
    which it has `received` so far; of several the one of the latest `attempt` counts.
    """

    protocol: Literal[1] = 1
    purpose: Literal["join", "probe", "link"]
    name: Name
    instance: str = ""
    hosts: int = 0
    port: _Port = 0
    run: str = ""
    to: str = ""
    session: str = ""
    attempt: Annotated[int, Field(ge=0)] = 0
    fresh: bool = True
    received: Annotated[int, Field(ge=0)] = 0


_REFUSED: Any = Field(
    validation_alias=AliasChoices("refused", "rejected"),
    serialization_alias="refused",  # as hosts up to version 0.3.0 call it
)


class Welcome(BaseModel, frozen=True, extra="forbid", strict=True):
    """The answer: why the host was rejected, or what this host received in the session.

    `known` is False if this host has no such session, and the other must begin a new one. `again`:
    the reason may be gone in a few seconds. `place` is the name of a lost host, which it may take;
    `later`: there may be one later.
    """

    rejected: Annotated[str, _REFUSED] = ""
    again: bool = False
    place: Name | None = None
    later: bool = False
    known: bool = True
    received: Annotated[int, Field(ge=0)] = 0


class Rejected(ConnectionError):  # noqa: N818  reads as what happened
    """The other host is a member of the run, and says why it does not want this connection."""

    def __init__(self, welcome: Welcome) -> None:
        super().__init__(welcome.rejected)
        self.welcome = welcome


def connect(
    address: tuple[str, int],
    context: ssl.SSLContext,
    hello: Callable[[], Hello],
    segments: Segments,
) -> Steps[tuple[ssl.SSLSocket, Hello]]:
    """Connect to a host and send the hello, drawn up at the last moment; returned with it."""
    sock = socket.socket(family_of(address[0]), socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        tune(sock)
        segments.limit(sock)  # before connecting: the SYN says it
        code = sock.connect_ex(address)  # raises nothing while it is under way
        if code == errno.EINPROGRESS:
            yield sock, WRITE
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        segments.established()
        sock = context.wrap_socket(sock, do_handshake_on_connect=False)
        yield from _shake_hands(sock)
        said = hello()
        yield from send(sock, said)
    except BaseException:
        socket.socket.close(sock)
        raise
    return sock, said


def accept(sock: socket.socket, context: ssl.SSLContext) -> Steps[tuple[ssl.SSLSocket, Hello]]:
    """The other side of `connect`."""
    try:
        sock.setblocking(False)
        tune(sock)
        sock.getpeername()  # fails if it is reset already, of which ssl leaves a socket open
        sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        yield from _shake_hands(sock)
        hello = yield from receive(sock, Hello)
    except BaseException:
        socket.socket.close(sock)
        raise
    return sock, hello


def peer_name(connection: ssl.SSLSocket) -> str | None:
    """The name in the peer's certificate; None if it uses the run's own key."""
    certificate: Any = connection.getpeercert()
    names = [value for part in certificate["subject"] for key, value in part if key == "commonName"]
    return None if names[0] == RUN_NAME else str(names[0])


def send(connection: ssl.SSLSocket, message: BaseModel) -> Steps[None]:
    """Send a message."""
    # without what is unknown: a peer of an older version rejects names that it does not know
    text = message.model_dump_json(exclude_none=True, by_alias=True).encode()
    data = memoryview(_LENGTH.pack(len(text)) + text)
    while data:
        try:
            data = data[connection.send(data) :]
        except ssl.SSLWantWriteError:
            yield connection, WRITE


def receive(connection: ssl.SSLSocket, model: type[_Model]) -> Steps[_Model]:
    """Receive a message.

    Raises:
        ValueError: it is none.
        OSError: the connection broke.
    """
    (length,) = _LENGTH.unpack((yield from _read(connection, _LENGTH.size)))
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes")
    text = yield from _read(connection, length)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"not a message of type {model.__name__}: {error}") from None


def _read(connection: ssl.SSLSocket, count: int) -> Steps[bytes]:
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except ssl.SSLWantReadError:
            yield connection, READ
            continue
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other host")
        data += part
    return data


def _shake_hands(connection: ssl.SSLSocket) -> Steps[None]:
    while True:
        try:
            return connection.do_handshake()
        except ssl.SSLWantReadError:
            yield connection, READ
        except ssl.SSLWantWriteError:
            yield connection, WRITE
