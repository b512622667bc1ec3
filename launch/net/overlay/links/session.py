"""Frames that arrive once and in order, whatever happens to the connections that carry them."""

import secrets
from collections import deque
from collections.abc import Iterator

from thinpipe.launch.net.overlay.links.frames import HEADER, FrameError, Header, Kind, Traffic

Buffer = bytes | memoryview
ACKNOWLEDGE_NBYTES = 256 * 1024
"""Received bytes after which an acknowledgement is sent at once; else it waits for a heartbeat."""


class Session:
    """One end of the numbered frames between two hosts; it outlives their connections.

    Frames are kept until the peer acknowledges them, and sent again over the next connection.
    """

    def __init__(self) -> None:
        self.identity = secrets.token_hex(8)
        self.received = 0
        """Number of the last frame that came."""
        self.resent = 0
        """Frames sent again after a reconnect, so far."""
        self.unacknowledged_nbytes = 0
        self._sent = 0
        self._kept: deque[tuple[int, Buffer]] = deque()
        self._since_acknowledged = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was sent or received yet."""
        return self._sent == 0 and self.received == 0

    def number(self, buffer: bytearray, kind: Kind, traffic: Traffic, stream: int) -> Buffer:
        """Write a frame's header before its payload, which starts at `HEADER.size`; keep it."""
        self._sent += 1
        length = len(buffer) - HEADER.size
        HEADER.pack_into(buffer, 0, kind, traffic, stream, self._sent, self.received, length)
        self._kept.append((self._sent, memoryview(buffer)))  # the bytes that are sent: no copy
        self.unacknowledged_nbytes += len(buffer)
        self._since_acknowledged = 0
        return self._kept[-1][1]

    def beat(self, padding: int = 0) -> Buffer:
        """A frame that is not kept."""
        self._since_acknowledged = 0
        header = (Kind.BEAT, Traffic.CONTROL, 0, 0, self.received, padding)
        return HEADER.pack(*header) + bytes(padding)

    def acknowledge(self, number: int) -> None:
        """The peer has all frames up to `number`; FrameError if it never got that many."""
        if number > self._sent:
            raise FrameError(f"an acknowledgement of frame {number}, after {self._sent} were sent")
        while self._kept and self._kept[0][0] <= number:
            self.unacknowledged_nbytes -= len(self._kept.popleft()[1])

    def accept(self, header: Header) -> None:
        """Take note of a frame that came whole; FrameError if it is not the next one."""
        self.acknowledge(header.acknowledged)
        if header.number == 0:
            return
        if header.number != self.received + 1:
            raise FrameError(f"frame {header.number} after frame {self.received}")
        self.received = header.number
        self._since_acknowledged += HEADER.size + header.length

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether the peer should hear now what came, lest it keep too much."""
        return self._since_acknowledged >= ACKNOWLEDGE_NBYTES

    def resume(self, received: int) -> Iterator[Buffer]:
        """Frames to resend over a new connection: all after the peer's last.

        Raises:
            FrameError: the peer says that it got more than was sent, or lost what it acknowledged.
        """
        self.acknowledge(received)
        if received < self._sent - len(self._kept):
            raise FrameError(
                f"the peer has {received} frames, but acknowledged {self._sent - len(self._kept)}"
            )
        self.resent += len(self._kept)
        return iter([buffer for _, buffer in self._kept])
