"""The process that owns an emulated network; `network.py` starts it.

Everything lives in namespaces without a name: two runs cannot collide, and the kernel clears all
away when they lose their last process. A keeper stays outside and watches the owner of the run;
the first process inside (1 of the pid namespace) builds the network and serves changes. When it
ends, the kernel kills every process of every host. It ends when the owner closes its socket, when
the keeper does, and the keeper ends it when the owner is gone, killed or not.
"""

import os
import pickle
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.host.links import NetworkSpec
from thinpipe.launch.shaped import control, linux, requirements
from thinpipe.launch.shaped.links import Host, build_hosts, shape_hosts
from thinpipe.launch.shaped.linux import ShapedError
from thinpipe.launch.shaped.names import mount_names
from thinpipe.launch.shaped.relay import Relay, open_port


def main() -> None:
    """Keep a network for the process that started us: spec on stdin, answers on a socket."""
    owner, owner_socket = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    spec: NetworkSpec = pickle.load(sys.stdin.buffer)
    owner_pidfd, keeper_pidfd = os.pidfd_open(owner), os.pidfd_open(os.getpid())
    if os.getppid() != owner:
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
        linux.die_with(keeper_pidfd)
        _rule(spec, owner_socket, server=server, run=run, with_user=with_user)
    owner_socket.close()
    select.select([owner_pidfd, os.pidfd_open(inside)], [], [])
    os.kill(inside, signal.SIGKILL)
    os.waitpid(inside, 0)


def _isolate() -> bool:
    """New namespaces for our children; whether a user namespace was needed to be allowed to."""
    kinds = linux.NEW_MOUNT | linux.NEW_NET | linux.NEW_UTS | linux.NEW_IPC | linux.NEW_PID
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(kinds)
        return False
    except PermissionError:
        pass
    try:
        linux.unshare(kinds | linux.NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise ShapedError(requirements.NO_NAMESPACES.format(reason=error)) from error
    return True


def _rule(
    spec: NetworkSpec, owner: socket.socket, *, server: socket.socket, run: int, with_user: bool
) -> NoReturn:
    """As process 1 of the sandbox: build, report, serve changes until the owner is done."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans end up here; nobody waits for them
    try:
        hosts = _build(spec)
        servers = [server, *_listen_on(hosts, run)]
        relay = [_start_relay(spec)] if spec.delay_s else []
    except ShapedError as error:
        owner.send(str(error).encode())
        os._exit(1)
    except BaseException:
        owner.send(f"cannot build the network:\n{traceback.format_exc()}".encode())
        os._exit(1)
    kinds = [kind for kind, _ in linux.SHARED if with_user or kind != "user"]
    descriptors = [linux.namespace(kind) for kind in kinds]
    descriptors += [fd for host in hosts for fd in (host.net_fd, host.uts_fd)]
    socket.send_fds(owner, [b"ready"], descriptors)
    _serve(spec, hosts, servers, until=[owner.fileno(), *relay])
    os._exit(0)


def _build(spec: NetworkSpec) -> list[Host]:
    try:
        linux.make_mounts_private()
        linux.mount_proc()
        mount_names(spec.hosts)
    except OSError as error:
        raise ShapedError(requirements.NO_MOUNTS.format(reason=error)) from error
    with IPRoute() as ip:
        requirements.check(requirements.needs(spec), ip)
    return build_hosts(spec)


def _listen_on(hosts: list[Host], run: int) -> list[socket.socket]:
    switch, servers = linux.namespace("net"), []
    for host in hosts:
        linux.setns(host.net_fd, linux.NEW_NET)
        servers.append(control.listen(run))
    linux.setns(switch, linux.NEW_NET)
    return servers


def _start_relay(spec: NetworkSpec) -> int:
    """Fork the relay; returns a pidfd."""
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
    """Serve changes until one of the descriptors `until` has something to say: its end."""
    by_descriptor = {server.fileno(): server for server in servers}

    def apply(change: control.Change) -> NetworkSpec:
        nonlocal spec
        changed = spec.changed(**change)
        _change(spec, changed, hosts)
        spec = changed
        return spec

    while True:
        ready = select.select([*until, *by_descriptor], [], [])[0]
        if not by_descriptor.keys() >= set(ready):
            return
        for descriptor in ready:
            control.answer(by_descriptor[descriptor], apply)


def _change(before: NetworkSpec, changed: NetworkSpec, hosts: list[Host]) -> None:
    """Switch to the rates of `changed`; if some are refused, back to those of `before`.

    Raises:
        ShapedError: says which rates hold.
    """
    try:
        with IPRoute() as ip:
            requirements.check(requirements.needs(changed), ip)
    except (NetlinkError, OSError) as error:
        raise ShapedError(
            f"the kernel does not say what it can: {error}; no rate was changed"
        ) from error
    refused = shape_hosts(changed, hosts)
    if refused:
        stuck = shape_hosts(before, hosts)
        now = f"and now those of before too ({stuck})" if stuck else "those of before hold"
        raise ShapedError(f"the kernel refuses these rates ({refused}); {now}")


if __name__ == "__main__":
    main()
