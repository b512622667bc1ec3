"""Everything between this host and one other: streams, over whichever connection there is."""

import heapq
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from thinpipe.launch.net.overlay.links.frames import (
    HEADER,
    LARGEST,
    FrameError,
    Header,
    Kind,
    Traffic,
    unpack,
)
from thinpipe.launch.net.overlay.links.loop import READ, WRITE, Loop
from thinpipe.launch.net.overlay.links.session import Buffer, Session
from thinpipe.launch.net.overlay.links.stream import Stream
from thinpipe.launch.net.overlay.links.tcp import (
    choose_congestion_control,
    limit_unsent,
    read_state,
)
from thinpipe.launch.net.overlay.settings import SILENT_S

BEAT_S = 0.5  # five make SILENT_S (settings.py)
_PORT = struct.Struct("!H")
_MOST_STREAMS = 4096  # a socket each; a peer that opens more is given up
_MOST_UNACKNOWLEDGED = 64 << 20  # RAM for what may be sent again: 0.5 s of 1 Gbit/s
_READ_BUDGET = 512 * 1024  # then other sockets have their turn
_LONG_S = 0.005  # as in tcp.py: over shorter round trips TCP is back at its rate at once
_URGENT_S = 0.02  # what was sent so lately may still be in queues on the way
_LOOK_S = 0.002  # whether there is room: less than the queue lasts that a state may make (tcp.py)
_PADDING_S, _BUSY_S = 0.1, 10.0  # under Linux's least RTO, 0.2 s: idle for one, TCP starts anew


@dataclass
class LinkStats:
    """Counts of a link so far; the display shows them too."""

    sent_nbytes: int = 0
    received_nbytes: int = 0
    resumed: int = 0
    """How often a new connection took over."""
    longest_silence_s: float = 0.0
    retransmitted: int = 0
    """TCP segments that were sent again."""
    round_trip_s: float = 0.0
    bbr: bool = False
    path_mtu: int = 0


class Link:
    """Frames to and from one peer.

    `exposed` says where a peer's stream may end here. `on_change` is called with the link,
    "silent", "back", "left" or "lost" (no connection for `patience_s`), and the reason.
    """

    def __init__(
        self,
        loop: Loop,
        peer: str,
        *,
        first_stream: int,
        patience_s: float,
        exposed: Callable[[int], tuple[str, int] | None],
        on_peer_list: Callable[[bytes], None],
        on_change: Callable[["Link", str, str], None],
    ) -> None:
        self.peer, self.session, self.stats = peer, Session(), LinkStats()
        self.connected = self.is_lost = False
        self.restarts = 0
        self.has_left = False
        """Whether the peer has said that it leaves; it may come back as another instance."""
        self.attempt = 0
        """Number of the peer's latest attempt to connect."""
        self._loop, self._patience_s, self._first_stream = loop, patience_s, first_stream
        self._exposed, self._on_peer_list, self._on_change = exposed, on_peer_list, on_change
        self._connection: ssl.SSLSocket | None = None
        self._heard_s = self._wrote_s = self._data_s = time.monotonic()
        self._retransmitted, self._rate_Bps = 0, 0
        self._looks_again = self._silent = False
        self._scratch = bytearray(LARGEST)
        self._frame_nbytes = LARGEST
        self._missing = memoryview(b"")
        self._begin()

    def _begin(self) -> None:
        self.has_left = False
        self.streams: dict[int, Stream] = {}
        self._next_stream = self._first_stream
        self._posted: deque[tuple[Kind, Traffic, int, bytes]] = deque()
        self._ready: list[tuple[Traffic, int, Stream]] = []
        self._order = 0
        self._again: Iterator[Buffer] = iter(())
        self._expect(None)
        self._partial: Buffer | None = None

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._heard_s

    @property
    def is_idle(self) -> bool:
        """Whether all that was to be sent has come to the peer, as far as it can."""
        sent = not (self._ready or self._posted or self.session.unacknowledged_nbytes)
        return sent or not self.connected

    def open(self, sock: socket.socket, port: int, traffic: Traffic) -> None:
        """Carry a local connection to a port of the peer's; a lost one is waited for once more."""
        if len(self.streams) >= _MOST_STREAMS:
            self._loop.close(sock)
            return
        if self.is_lost:
            self.is_lost, self._heard_s = False, time.monotonic()
        number = self._next_stream
        self._next_stream += 2  # the peer's are the others, even or odd
        stream = self.streams[number] = Stream(self, self._loop, sock, number, traffic)
        self.post(Kind.OPEN, stream, _PORT.pack(port))
        stream.start()

    def say(self, kind: Literal[Kind.BYE, Kind.PEER_LIST], data: bytes = b"") -> None:
        """Tell the peer what concerns no stream."""
        self._posted.append((kind, Traffic.CONTROL, 0, data))
        self._watch()

    def ready(self, stream: Stream) -> None:
        """A stream has bytes to send; urgent traffic goes first, and streams take turns."""
        self._order += 1
        heapq.heappush(self._ready, (stream.traffic, self._order, stream))
        self._watch()

    def post(self, kind: Kind, stream: Stream, payload: bytes = b"") -> None:
        self._posted.append((kind, stream.traffic, stream.number, payload))
        self._watch()

    def prepare(self, identity: str, *, fresh: bool) -> bool:
        """The peer makes a new connection for a session; return whether it can go on here."""
        self._disconnect()
        if identity == self.session.identity:
            return True
        if fresh and self.session.is_fresh:  # streams that wait here for the first connection stay
            self.session.identity = identity
        elif fresh:
            self.restart(identity)
        return fresh

    def use(self, connection: ssl.SSLSocket, received: int) -> None:
        """Go on over a new connection; the peer has `received` frames of this session."""
        try:
            self._again = self.session.resume(received)
        except FrameError as error:
            self._loop.close(connection)
            self.give_up(f"sent {error}")
            return
        self.stats.resumed += not self.session.is_fresh
        self._expect(None)  # half a frame of the old connection comes again
        now_s = time.monotonic()
        self._note_silence(now_s)
        self._connection, self.connected, self.is_lost = connection, True, False
        self._heard_s = self._wrote_s = now_s
        self._retransmitted, self.stats.bbr = 0, False
        if self._silent:
            self._silent = False
            self._on_change(self, "back", "")
        self._loop.watch(connection, READ | WRITE, self._on_event)

    def restart(self, identity: str | None = None) -> None:
        """Forget the session with all its streams; begin another, the peer's if it names one."""
        for stream in list(self.streams.values()):
            stream.reset(tell=False)
        self.restarts += 1
        self.session = Session()
        if identity is not None:
            self.session.identity = identity
        self._begin()

    def drop(self, reason: str) -> None:
        """The connection is of no use any more; if the peer has left, neither are its streams."""
        if self.connected and not self._silent and not self.has_left:
            self._silent = True
            self._on_change(self, "silent", reason)
        self._disconnect()
        if self.has_left:
            self._on_change(self, "left", "")
            self.restart()
            self.has_left = True

    def give_up(self, reason: str) -> None:
        """Break all streams: who uses them learns at once. Who is gone is not missed again."""
        is_gone = self.is_lost or self.has_left
        self._disconnect()
        self.is_lost = True
        if not is_gone:
            self._on_change(self, "lost", reason)
        self.restart()

    def tick(self, now_s: float, late_s: float) -> None:
        if late_s > 2 * BEAT_S:  # it was this process that paused
            self._heard_s = min(now_s, self._heard_s + late_s)
        silence_s = now_s - self._heard_s
        if self._connection is not None:
            self._read_kernel()
            if silence_s > SILENT_S:
                self.drop(f"nothing heard for {silence_s:.1f} s{self._diagnosis()}")
            elif now_s - self._wrote_s >= (_PADDING_S if self._pads(now_s) else BEAT_S):
                self._watch(beat=True)
        elif silence_s > self._patience_s and not (self.is_lost or self.has_left):
            self.give_up(f"no connection for {silence_s:.0f} s (network.patience_s)")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._loop.close(self._connection)
        self._connection, self.connected, self._partial = None, False, None  # sent again as a whole

    def _note_silence(self, now_s: float) -> None:
        silence_s = now_s - self._heard_s
        self.stats.longest_silence_s = max(self.stats.longest_silence_s, silence_s)

    def _read_kernel(self) -> None:
        assert self._connection is not None
        state = read_state(self._connection)
        if state is None:
            return
        self.stats.round_trip_s, self._rate_Bps = state.round_trip_s, state.rate_Bps
        self.stats.path_mtu = state.path_mtu
        self._frame_nbytes = limit_unsent(self._connection, state.rate_Bps)
        self.stats.retransmitted += max(0, state.retransmitted - self._retransmitted)
        self._retransmitted = state.retransmitted
        if not self.stats.bbr:
            self.stats.bbr = choose_congestion_control(self._connection)

    def _diagnosis(self) -> str:
        """Whether the other kernel still answers: then its process hangs, not the network."""
        state = read_state(self._connection) if self._connection is not None else None
        if state is None or state.last_answer_s > SILENT_S:
            return ""
        return "; its machine answers, so its process is stopped or starved"

    def _pads(self, now_s: float) -> bool:
        """Whether padding keeps TCP from forgetting the rate between two steps of training."""
        long = self.stats.round_trip_s >= _LONG_S and not self.stats.bbr
        return long and now_s - self._data_s < _BUSY_S

    def _on_event(self, events: int) -> None:
        try:
            if events & READ:
                self._read()
            if events & WRITE and self._connection is not None:
                self._write()
        except (OSError, ValueError) as error:
            self.drop(str(error) or type(error).__name__)
        except FrameError as error:
            self.give_up(f"sent {error}")

    def _has_room(self) -> bool:
        """Whether a newcomer's state, for which nobody waits, may be sent; if not, look again."""
        assert self._connection is not None
        state = read_state(self._connection)
        is_urgent = time.monotonic() - self._loop.urgent_s < _URGENT_S  # on any link of this host
        if state is None or state.has_room(is_shared=is_urgent):
            return True
        if not self._looks_again:
            self._looks_again = True
            self._loop.after(_LOOK_S, self._look_again)
        return False

    def _look_again(self) -> None:
        self._looks_again = False
        self._watch()

    def _watch(self, *, beat: bool = False) -> None:
        if self._connection is None:
            return
        if beat and self._partial is None:  # a frame under way is a sign of life, too
            padding = int(self._rate_Bps * _PADDING_S / 10) if self._pads(time.monotonic()) else 0
            self._partial = self.session.beat(min(LARGEST, padding))
        self._loop.watch(self._connection, READ | WRITE, self._on_event)

    def _write(self) -> None:
        """At most one frame: the kernel asks for more when it has sent enough of it."""
        assert self._connection is not None
        if self._partial is None:
            self._partial = self._next()
        if self._partial is None:
            self._loop.watch(self._connection, READ, self._on_event)
            return
        try:
            sent = self._connection.send(self._partial)
        except ssl.SSLWantWriteError:  # OpenSSL wants the same bytes again: they stay in `_partial`
            return
        self._wrote_s = time.monotonic()
        self.stats.sent_nbytes += sent
        self._partial = memoryview(self._partial)[sent:] or None

    def _next(self) -> Buffer | None:
        again = next(self._again, None)
        if again is not None:  # first of all: the peer takes frames by number
            return again
        if self._posted:  # before data: OPEN of their streams, and credit
            kind, traffic, number, payload = self._posted.popleft()
            buffer = bytearray(HEADER.size) + payload
            return self.session.number(buffer, kind, traffic, number)
        while self._ready and self.session.unacknowledged_nbytes < _MOST_UNACKNOWLEDGED:
            if self._ready[0][0] is Traffic.JOINING and not self._has_room():
                break
            stream = heapq.heappop(self._ready)[2]
            if self.streams.get(stream.number) is not stream:  # it was closed as it waited here
                continue
            pulled = stream.pull(memoryview(self._scratch)[: self._frame_nbytes])
            if pulled is not None:
                self._data_s = time.monotonic()
                if stream.traffic is not Traffic.JOINING:
                    self._loop.urgent_s = self._data_s
                return self.session.number(pulled[1], pulled[0], stream.traffic, stream.number)
        return self.session.beat() if self.session.owes_acknowledgement else None

    def _read(self) -> None:
        connection, budget = self._connection, _READ_BUDGET
        assert connection is not None
        # what OpenSSL has decrypted already wakes no selector
        while self._connection is connection and (budget > 0 or connection.pending()):
            try:
                count = connection.recv_into(self._missing)
            except ssl.SSLWantReadError:
                return
            if count == 0:
                raise ConnectionResetError("closed by the other host")
            budget -= count
            self.stats.received_nbytes += count
            now_s = time.monotonic()
            self._note_silence(now_s)
            self._heard_s = now_s
            self._missing = self._missing[count:]
            if not self._missing:
                self._on_part()

    def _expect(self, header: Header | None) -> None:
        self._header = header
        self._part = bytearray(HEADER.size if header is None else header.length)
        self._missing = memoryview(self._part)

    def _on_part(self) -> None:
        header = self._header
        if header is None:
            header = unpack(self._part)
            self._expect(header)
        if not self._missing:
            payload = memoryview(self._part)
            self._expect(None)
            self.session.accept(header)
            self._handle(header, payload)
        if self.session.owes_acknowledgement or self._ready:
            self._watch()

    def _handle(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.OPEN:
            self._open_here(header, payload)
        elif header.kind is Kind.PEER_LIST:
            self._on_peer_list(bytes(payload))
        elif header.kind is Kind.BYE:
            self.has_left = True
        stream = self.streams.get(header.stream)
        if stream is None:  # closed here, while this was on its way
            return
        if header.kind is Kind.DATA:
            stream.deliver(payload)
        elif header.kind is Kind.CREDIT:
            stream.credit(int.from_bytes(payload, "big"))
        elif header.kind is Kind.END:
            stream.end()
        elif header.kind is Kind.RESET:
            stream.reset(tell=False)

    def _open_here(self, header: Header, payload: memoryview) -> None:
        """A stream that begins at the peer ends at a port of this host, if that is exposed."""
        own = header.stream % 2 == self._first_stream % 2
        if own or header.stream in self.streams or len(self.streams) >= _MOST_STREAMS:
            raise FrameError(f"a stream {header.stream} that it cannot open")
        if len(payload) != _PORT.size:
            raise FrameError(f"an OPEN frame of {len(payload)} bytes")
        address = self._exposed(_PORT.unpack(payload)[0])
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left; the frame counts
            self._posted.append((Kind.RESET, header.traffic, header.stream, b""))
            return
        number, traffic = header.stream, header.traffic
        stream = self.streams[number] = Stream(self, self._loop, sock, number, traffic)
        if address is None:
            stream.reset()
        else:
            stream.start(address)
