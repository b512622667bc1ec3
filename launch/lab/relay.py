"""Delays: a layer-2 switch in user space that holds each frame for the delay of its link.

It replaces the kernel bridge of networks without delays. One packet socket per port; frames keep
their offload header (`PACKET_VNET_HDR`), so that a 16 KB packet costs one receive and one send.
Rates are limited by the kernel's token buckets on either side.
"""

import heapq
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from thinpipe.launch.lab.names import host_mac
from thinpipe.launch.lab.requirements import needs
from thinpipe.launch.lab.spec import NetworkSpec

PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
_SOL_PACKET = 263
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
_LARGEST_FRAME = 70_000
_BUFFER_BYTES = 16 << 20
_BATCH = 64
_MAC = slice(10, 16)  # position of the destination address: after 10 bytes of offload header


def open_port(interface: str) -> socket.socket:
    """A socket that receives and sends whole frames on one port of the switch."""
    with needs("packet"):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        port.setsockopt(_SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for usual, beyond_limit in (
        (socket.SO_RCVBUF, _SO_RCVBUFFORCE),
        (socket.SO_SNDBUF, _SO_SNDBUFFORCE),
    ):
        port.setsockopt(socket.SOL_SOCKET, usual, _BUFFER_BYTES)
        with suppress(PermissionError):  # a normal user gets the system's limit
            port.setsockopt(socket.SOL_SOCKET, beyond_limit, _BUFFER_BYTES)
    port.bind((interface, _ETH_P_ALL))
    port.setblocking(False)
    return port


class Relay:
    """Receives frames on ports and sends each to its target port when it is due."""

    def __init__(self, spec: NetworkSpec, ports: Sequence[socket.socket]) -> None:
        self._delay_s = spec.delay_s
        self._ports = ports
        self._sources = {port: index for index, port in enumerate(ports)}
        self._targets = {
            bytes.fromhex(host_mac(host).replace(":", "")): host for host in range(spec.hosts)
        }
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        while True:
            self._send_due()
            timeout = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for port in select.select(self._ports, [], [], timeout)[0]:
                self._take(port)

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._waiting)
            with suppress(OSError):  # a full queue: the frame is lost, as on a real link
                self._ports[target].send(frame)

    def _take(self, port: socket.socket) -> None:
        source = self._sources[port]
        for _ in range(_BATCH):
            try:
                frame = port.recv(_LARGEST_FRAME)
            except BlockingIOError:
                return
            target = self._targets.get(frame[_MAC])
            if target is None:  # hosts know each other's addresses; other frames are dropped
                continue
            due = time.monotonic() + self._delay_s.get((source, target), 0.0)
            self._count += 1
            heapq.heappush(self._waiting, (due, self._count, target, frame))
