"""The process that owns an emulated network; `network.py` starts it.

Everything is in unnamed namespaces: runs cannot collide, and the kernel removes them with their
last process. A supervisor outside waits for the owner of the run; the first process inside (pid 1
of the namespace) creates the network and serves rate changes. When that exits, the kernel kills
every process of every host. It exits when the owner closes its socket or the supervisor exits, and
the supervisor kills it when the owner has exited for any reason.
"""

import heapq
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from thinpipe.launch.lab import control, linux, requirements
from thinpipe.launch.lab.links import Host, build_hosts, shape_hosts
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.names import host_mac, mount_names
from thinpipe.launch.lab.requirements import needs
from thinpipe.launch.lab.spec import Change, NetworkSpec

# linux/if_packet.h, linux/socket.h, asm-generic/socket.h, linux/if_ether.h
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
_SOL_PACKET = 263
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
_LARGEST_FRAME = 70_000  # 64 KiB of a segment (GSO), and headers; recv would cut off more
_BUFFER_BYTES = 16 << 20  # 0.13 s at 1 Gbit/s, while other processes keep the relay waiting
_BATCH = 64  # frames of a port; then what is due is sent, and others have their turn
_MAC = slice(10, 16)  # position of the destination address: after 10 bytes of offload header


def main() -> None:
    """Supervise a network for the parent process: spec on stdin, replies on a socket."""
    owner, owner_socket = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    spec: NetworkSpec = pickle.load(sys.stdin.buffer)
    owner_pidfd, own_pidfd = os.pidfd_open(owner), os.pidfd_open(os.getpid())
    if os.getppid() != owner:  # it has ended: its number may be another's, and so the pidfd
        sys.exit(1)
    run = os.getpid()
    server = control.listen(run)
    try:
        with_user = _isolate()
    except ShapedError as error:
        owner_socket.send(str(error).encode())
        sys.exit(1)
    inside = os.fork()
    if inside == 0:
        linux.die_with_parent(own_pidfd)  # and with process 1 all of its namespace
        _run_inside(spec, owner_socket, server=server, run=run, with_user=with_user)
    owner_socket.close()  # else the owner would not see an end if the child dies
    select.select([owner_pidfd, os.pidfd_open(inside)], [], [])
    os.kill(inside, signal.SIGKILL)
    os.waitpid(inside, 0)


def _isolate() -> bool:
    """Create namespaces for our children; return whether that needed a user namespace."""
    kinds = linux.NEW_MOUNT | linux.NEW_NET | linux.NEW_UTS | linux.NEW_IPC | linux.NEW_PID
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(kinds)
        return False
    except PermissionError:
        pass
    try:
        linux.unshare(kinds | linux.NEW_USER)
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")  # else gid_map is refused
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="utf-8")
    except OSError as error:
        raise ShapedError(requirements.NO_NAMESPACES.format(reason=error)) from error
    return True


def _run_inside(
    spec: NetworkSpec, owner: socket.socket, *, server: socket.socket, run: int, with_user: bool
) -> NoReturn:
    """Process 1 of the sandbox: create the network, report, serve changes until the owner exits."""
    # orphans become our children; the kernel reaps them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        hosts = _build(spec)
        servers = [server, *_listen_on(hosts, run)]
        relay = [_start_relay(spec)] if spec.delay_s else []
    except ShapedError as error:
        owner.send(str(error).encode())
        os._exit(1)
    except BaseException:
        owner.send(f"cannot create the network:\n{traceback.format_exc()}".encode())
        os._exit(1)
    kinds = [kind for kind, _ in linux.SHARED if with_user or kind != "user"]
    descriptors = [linux.namespace(kind) for kind in kinds]
    descriptors += [fd for host in hosts for fd in (host.net_fd, host.uts_fd)]
    socket.send_fds(owner, [b"ready"], descriptors)
    _serve(spec, hosts, servers, until=[owner.fileno(), *relay])
    os._exit(0)  # as process 1: the kernel ends all others


def _build(spec: NetworkSpec) -> list[Host]:
    try:
        linux.make_mounts_private()
        linux.mount_proc()
        mount_names(spec.hosts)
    except OSError as error:
        raise ShapedError(requirements.NO_MOUNTS.format(reason=error)) from error
    return build_hosts(spec)


def _listen_on(hosts: list[Host], run: int) -> list[socket.socket]:
    switch, servers = linux.namespace("net"), []
    for host in hosts:
        linux.setns(host.net_fd, linux.NEW_NET)
        servers.append(control.listen(run))
    linux.setns(switch, linux.NEW_NET)
    return servers


def _start_relay(spec: NetworkSpec) -> int:
    ports = [open_port(f"h{host}") for host in range(spec.hosts)]
    relay = os.fork()
    if relay == 0:
        try:
            Relay(spec, ports).run()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    for port in ports:
        port.close()
    return os.pidfd_open(relay)


def _serve(
    spec: NetworkSpec, hosts: list[Host], servers: list[socket.socket], *, until: list[int]
) -> None:
    """Serve changes until one of the descriptors `until` becomes readable, at its end."""
    by_descriptor = {server.fileno(): server for server in servers}

    def apply(change: Change) -> NetworkSpec:
        nonlocal spec
        changed = spec.changed(change)
        try:
            shape_hosts(changed, hosts)
        except ShapedError as error:
            try:
                shape_hosts(spec, hosts)
            except ShapedError as stuck:
                raise ShapedError(f"{error}, and also the previous ones: {stuck}") from None
            raise ShapedError(f"{error}; the previous ones are in force") from None
        spec = changed
        return spec

    while True:
        ready = select.select([*until, *by_descriptor], [], [])[0]
        if not by_descriptor.keys() >= set(ready):
            return
        for descriptor in ready:
            control.answer(by_descriptor[descriptor], apply)


def open_port(interface: str) -> socket.socket:
    """A socket that receives and sends whole frames on one port of the switch."""
    with needs("packet"):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        port.setsockopt(_SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)  # else what it sends comes back
    for usual, beyond_limit in (
        (socket.SO_RCVBUF, _SO_RCVBUFFORCE),
        (socket.SO_SNDBUF, _SO_SNDBUFFORCE),
    ):
        port.setsockopt(socket.SOL_SOCKET, usual, _BUFFER_BYTES)
        with suppress(PermissionError):  # a normal user gets the system's limit
            port.setsockopt(socket.SOL_SOCKET, beyond_limit, _BUFFER_BYTES)
    port.bind((interface, _ETH_P_ALL))  # last: from here on it receives
    port.setblocking(False)
    return port


class Relay:
    """A layer-2 switch in user space that holds each frame for the delay of its link.

    It replaces the kernel bridge of networks without delays. One packet socket per port; frames
    keep their offload header (`PACKET_VNET_HDR`), so that a 16 KB packet costs one receive and one
    send. Rates are limited by the kernel's token buckets on either side.
    """

    def __init__(self, spec: NetworkSpec, ports: Sequence[socket.socket]) -> None:
        self._delay_s = spec.delay_s
        self._ports = ports
        self._sources = {port: index for index, port in enumerate(ports)}
        macs = (host_mac(host).replace(":", "") for host in range(spec.hosts))
        self._targets = {bytes.fromhex(mac): host for host, mac in enumerate(macs)}
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
            self._count += 1  # of equal times the first goes first
            heapq.heappush(self._waiting, (due, self._count, target, frame))


if __name__ == "__main__":
    main()
