"""Rate limits: queueing disciplines (token buckets) on the two ends of a host's link."""

import errno
import socket
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.host.links import FRAME_BYTES, MAX_RATE_BPS
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.names import host_address
from thinpipe.launch.lab.requirements import needs
from thinpipe.launch.lab.spec import NetworkSpec

QUEUE_S = 0.05
"""Length of a full queue in seconds; further packets are dropped."""
_BURST_S, _LARGEST_BURST = 0.0004, 16384  # 16 KiB from 328 Mbit/s on; see `gso_bytes`
_DEFAULT_GSO = 65536  # the kernel's default of gso_max_size
_HANDLE, _TOP, _FIRST, _REST = 0x10000, 0x1, 0x2, 0xFFF
"""htb's handle; its classes: the whole host, towards host 0, everything else."""
_BASE_BPS = 8_000.0
"""Rate of a class without borrowing: almost nothing, so that the host's own rate limits the sum."""

_NOTHING_THERE = (errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class Shape:
    """Limits of one interface in bit/s: of all traffic, and of traffic to some hosts."""

    rate_bps: float | None = None
    towards_bps: tuple[tuple[int, float], ...] = ()

    def slowest_bps(self) -> float | None:
        limits = [bps for _, bps in self.towards_bps]
        return min([*limits, self.rate_bps] if self.rate_bps else limits, default=None)


def uplink(spec: NetworkSpec, host: int) -> Shape:
    """Limits of a host's own interface."""
    towards = sorted((j, bps) for (i, j), bps in spec.pair_bps.items() if i == host)
    return Shape(spec.up_bps[host], tuple(towards))


class Shaper:
    """Limits one interface to a `Shape`, which may change while traffic flows."""

    def __init__(self, ip: IPRoute, interface: int) -> None:
        self._ip = ip
        self._interface = interface
        self._shape: Shape | None = Shape()
        """None after a failed change: the state of the kernel is unknown."""

    def apply(self, shape: Shape) -> None:
        """Change the limits; without losing packets unless limits are added or removed, or a bucket
        becomes smaller.

        If that fails, set them up from scratch.
        """
        if shape != self._shape:
            old, self._shape = self._shape, None
            try:
                self._switch(old, shape)
            except (NetlinkError, ShapedError):
                if old is None:
                    raise
                self._switch(None, shape)
            self._shape = shape

    def _switch(self, old: Shape | None, shape: Shape) -> None:
        size = gso_bytes(shape.slowest_bps())
        # first: a segment larger than its bucket costs ten times as much
        self._ip.link("set", index=self._interface, gso_max_size=size)
        before = None if old is None else _structure(old)
        # a packet that is queued now may not fit into a smaller bucket, and would wait forever
        same_kind = before == _structure(shape) and not _shrinks(old, shape)
        if before != "open" and not same_kind:
            self._clear()
        if shape.towards_bps:
            self._tree(shape, "replace" if same_kind else "add")
        elif shape.rate_bps is not None:
            self._bucket(shape.rate_bps)

    def _tc(self, verb: str, kind: str, *handle: int, **options: object) -> None:
        with needs(kind):
            self._ip.tc(verb, kind, self._interface, *handle, **options)

    def _clear(self) -> None:
        try:
            self._ip.tc("del", index=self._interface, root=True)
        except NetlinkError as error:
            if error.code not in _NOTHING_THERE:
                raise

    def _bucket(self, bps: float) -> None:
        self._tc(
            "replace",
            "tbf",
            root=True,
            rate=int(bps / 8),
            burst=burst_bytes(bps),
            latency=f"{QUEUE_S * 1e3:.0f}ms",
        )

    def _tree(self, shape: Shape, verb: str) -> None:
        """A class per limited destination and one for all others, within the host's own rate."""
        top_bps = shape.rate_bps or MAX_RATE_BPS
        if verb == "add":
            self._tc("add", "htb", _HANDLE, root=True, default=_REST)
        self._class(verb, _TOP, rate_bps=top_bps, ceil_bps=top_bps)
        self._leaf(verb, _REST, top_bps)
        for host, bps in shape.towards_bps:
            minor = _FIRST + host
            self._leaf(verb, minor, min(bps, top_bps))
            if verb == "add":
                self._filter(host, minor)

    def _class(self, verb: str, minor: int, *, rate_bps: float, ceil_bps: float) -> None:
        self._tc(
            f"{verb}-class",
            "htb",
            _HANDLE | minor,
            parent=_HANDLE if minor == _TOP else _HANDLE | _TOP,
            rate=int(rate_bps / 8),
            ceil=int(ceil_bps / 8),
            burst=FRAME_BYTES if rate_bps < ceil_bps else burst_bytes(ceil_bps),
            cburst=burst_bytes(ceil_bps),
            quantum=_LARGEST_BURST,  # htb's own, a tenth of the rate, may be less than a frame
        )

    def _leaf(self, verb: str, minor: int, bps: float) -> None:
        self._class(verb, minor, rate_bps=min(_BASE_BPS, bps), ceil_bps=bps)
        self._tc(
            "replace",
            "tbf",  # only as a queue with a length in bytes: its rate never delays a packet
            (0x1000 | minor) << 16,  # a major number of its own: 1 is the root's
            parent=_HANDLE | minor,
            rate=int(MAX_RATE_BPS / 8),
            burst=2 * _DEFAULT_GSO,
            limit=int(bps / 8 * QUEUE_S) + burst_bytes(bps),
        )

    def _filter(self, host: int, minor: int) -> None:
        self._tc(
            "add-filter",
            "u32",
            parent=_HANDLE,
            prio=10,
            protocol=0x0800,  # ETH_P_IP
            target=_HANDLE | minor,
            # IPv4 has the destination at byte 16
            keys=[f"0x{socket.inet_aton(host_address(host)).hex()}/0xffffffff+16"],
        )


def _shrinks(old: Shape | None, new: Shape) -> bool:
    """Whether the bucket of all traffic, which is a queue too, does; htb may lend a packet."""
    if old is None or old.rate_bps is None or new.rate_bps is None or new.towards_bps:
        return False
    return burst_bytes(new.rate_bps) < burst_bytes(old.rate_bps)


def gso_bytes(bps: float | None) -> int:
    """The largest segment that TCP may build (GSO): 0.4 ms of the rate.

    A bucket smaller than a segment makes the kernel split it in software, at ten times the cost; a
    larger bucket would let that much pass unlimited after every pause.
    """
    if bps is None:
        return _DEFAULT_GSO
    return int(min(_LARGEST_BURST, max(FRAME_BYTES, bps / 8 * _BURST_S)))


def burst_bytes(bps: float) -> int:
    """The size of a token bucket: one segment as TCP builds it, and a frame."""
    return gso_bytes(bps) + FRAME_BYTES + 86


def _structure(shape: Shape) -> str:
    """Structure of the queues: if it differs, they are set up from scratch."""
    if shape.towards_bps:
        return "tree " + " ".join(str(host) for host, _ in shape.towards_bps)
    return "open" if shape.rate_bps is None else "bucket"
