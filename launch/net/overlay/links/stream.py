"""One local TCP connection, whose other end is a TCP connection on another host."""

import errno
import socket
from collections import deque
from typing import TYPE_CHECKING

from thinpipe.launch.net.overlay.links.frames import HEADER, FrameError, Kind, Traffic
from thinpipe.launch.net.overlay.links.loop import READ, WRITE, Loop

if TYPE_CHECKING:
    from thinpipe.launch.net.overlay.links.link import Link

WINDOW_NBYTES = 32 << 20
"""Bytes of a stream that may be on their way: what a host holds at most if nobody reads them."""


class Stream:
    """Bytes are read from the local socket when the link can send them, and written to it at once.

    Nothing is read that the other end has no room for: so both ends are bounded in memory, and a
    slow reader slows its writer down, as on a direct connection.
    """

    def __init__(
        self, link: "Link", loop: Loop, sock: socket.socket, number: int, traffic: Traffic
    ) -> None:
        self.number, self.traffic = number, traffic
        self._link, self._loop, self._sock = link, loop, sock
        self._may_send = self._may_receive = WINDOW_NBYTES
        self._waiting: deque[memoryview] = deque()
        self._written = 0  # bytes written since the last credit was given
        self._connecting = self._is_ready = self._no_more_out = self._no_more_in = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, address: tuple[str, int] | None = None) -> None:
        """Serve the local connection, which is made now if an address is given."""
        if address is not None:
            code = self._sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                self.reset()
                return
            self._connecting = True
        self._update()

    def pull(self, scratch: memoryview) -> tuple[Kind, bytearray] | None:
        """The next frame, with room for its header and at most the payload that fits `scratch`.

        None if there is nothing after all.
        """
        self._is_ready = False
        room = scratch[: self._may_send]  # never read what cannot be sent: it would pile up here
        try:
            length = self._sock.recv_into(room)
        except BlockingIOError:
            self._update()
            return None
        except OSError:
            self.reset()
            return None
        if length == 0:
            self._no_more_out = True
            self._update()
            self._finish()
            return Kind.END, bytearray(HEADER.size)
        self._may_send -= length
        if length == len(scratch) and self._may_send:  # there is more: no need to ask the selector
            self._is_ready = True
            self._link.ready(self)
        else:
            self._update()
        buffer = bytearray(HEADER.size + length)
        buffer[HEADER.size :] = room[:length]
        return Kind.DATA, buffer

    def deliver(self, payload: memoryview) -> None:
        """Bytes from the other end; FrameError if they are more than there is room for."""
        self._may_receive -= len(payload)
        if self._may_receive < 0 or self._no_more_in:
            raise FrameError(f"stream {self.number}: data beyond its credit")
        self._waiting.append(payload)
        if not self._connecting and len(self._waiting) == 1:
            self._write()

    def credit(self, nbytes: int) -> None:
        """The other end has written that much."""
        self._may_send += nbytes
        self._update()

    def end(self) -> None:
        self._no_more_in = True
        if not self._connecting and not self._waiting:
            self._write()

    def reset(self, *, tell: bool = True) -> None:
        """Close the local connection, and have the other end do so."""
        if tell:
            self._link.post(Kind.RESET, self)
        self._no_more_out = self._no_more_in = True
        self._waiting.clear()
        self._finish()

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            if self._connecting and self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.reset()
                return
            self._connecting = False
            self._write()
        if events & READ and not self._is_ready and self._sock.fileno() >= 0:
            self._is_ready = True
            self._link.ready(self)
            self._update()

    def _write(self) -> None:
        try:
            while self._waiting:
                sent = self._sock.send(self._waiting[0])
                self._written += sent
                if sent < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][sent:]
                else:
                    self._waiting.popleft()
            if self._no_more_in:
                self._sock.shutdown(socket.SHUT_WR)  # the other direction goes on
        except BlockingIOError:
            pass
        except OSError:
            self.reset()
            return
        if self._written >= WINDOW_NBYTES // 4:  # seldom: a credit is a frame of its own
            self._link.post(Kind.CREDIT, self, self._written.to_bytes(4, "big"))
            self._may_receive += self._written
            self._written = 0
        self._update()
        self._finish()

    def _update(self) -> None:
        if self._sock.fileno() < 0:
            return
        reads = not (self._is_ready or self._no_more_out or self._connecting) and self._may_send > 0
        writes = self._connecting or bool(self._waiting)
        self._loop.watch(self._sock, READ * reads | WRITE * writes, self._on_event)

    def _finish(self) -> None:
        if self._no_more_out and self._no_more_in and not self._waiting:
            self._loop.close(self._sock)
            self._link.streams.pop(self.number, None)
