"""How processes of this host talk to its relay: a line of JSON each way, over a Unix socket.

The socket lies in a folder that only this user can enter.
"""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from thinpipe.launch.net.overlay.links.loop import READ, WRITE, Loop, Steps

ADDRESS = "THINPIPE_OVERLAY"
"""Environment variable: where ranks find the relay's socket."""
_LONGEST, _LIMIT_S = 1 << 20, 10.0  # of a request; who says more or is slower is hung up on


class OverlayError(RuntimeError):
    """The relay could not do what it was asked, or is gone."""


class Client:
    """How a process asks the relay; a connection per question."""

    def __init__(self, path: str, *, wait_s: float = 10.0) -> None:
        self._path, self._wait_s = path, wait_s

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have the relay do something for this process; OverlayError if it cannot, or is gone."""
        line = json.dumps({"do": what, "pid": os.getpid(), **arguments}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(self._wait_s)
                sock.connect(self._path)
                sock.sendall(line)
                with sock.makefile("rb") as lines:
                    line = lines.readline()
        except TimeoutError:
            raise OverlayError("this machine's relay does not answer") from None
        except OSError as error:
            raise OverlayError(f"this machine's relay is gone ({error.strerror})") from None
        if not line:
            raise OverlayError("this machine's relay is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise OverlayError(answer["error"])
        return answer["answer"]


class Server:
    """The relay's side: `handle` returns the answer to a request, or raises OverlayError."""

    def __init__(self, loop: Loop, handle: Callable[[str, dict[str, Any]], Any]) -> None:
        self._loop, self._handle = loop, handle

    def listen(self, path: str) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        self._loop.listen(server, self._accept)

    def _accept(self, sock: socket.socket, _: object) -> None:
        def close(_: object) -> None:
            self._loop.close(sock)

        self._loop.spawn(self._serve(sock), _LIMIT_S, done=close, failed=close)

    def _serve(self, sock: socket.socket) -> Steps[None]:
        sock.setblocking(False)
        line = b""
        while not line.endswith(b"\n"):
            yield sock, READ
            data = sock.recv(65536)
            if not data or len(line) > _LONGEST:
                return
            line += data
        answer = self._answer(line)
        while answer:
            yield sock, WRITE
            answer = answer[sock.send(answer) :]

    def _answer(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
            answer = {"answer": self._handle(request.pop("do"), request)}
        except OverlayError as error:
            answer = {"error": str(error)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            answer = {"error": f"not a request: {error!r}"}
        return json.dumps(answer).encode() + b"\n"
