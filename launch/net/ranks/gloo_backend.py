"""torch's gloo, listening where this host should, with a port for each kind of traffic.

torch's own "gloo" listens at an address of one interface. Registered under another name it is the
same engine, for all groups: the transport's, those of device meshes, FSDP2's.
"""

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from thinpipe.pipeline.comm.abandoned import abandonable
from thinpipe.pipeline.comm.gloo import Traffic
from thinpipe.pipeline.comm.gloo_link import Naming

BACKEND = "thinpipe"
"""Its name in `init_process_group` and `new_group`, whose `pg_options` say what a group carries."""

PORTS: dict[str, int] = {}
"""At which this process listens, by traffic, once that is known."""
JOINING = "joining"
"""The traffic of `pair`: nobody waits for it."""
_DEFAULT = "control"
_DEVICES: dict[str, Any] = {}
_MOST_DESCRIPTORS = 1024
"""Looked at where the system does not list them; a rank has about 50 when it starts."""


def register(address: str | None, *, joining: bool) -> dict[str, int]:
    """Register it; return the port of each kind of traffic, that of `pair` only if `joining`.

    Without an address it listens where torch's own does, which GLOO_SOCKET_IFNAME decides, at a
    port for every group.
    """
    ports = dict[str, int]()
    if address is not None:
        for traffic in (*get_args(Traffic), *[JOINING] * joining):
            before = _listening(address)
            _DEVICES[traffic] = dist.ProcessGroupGloo.create_device(hostname=address)
            (ports[traffic],) = _listening(address) - before
    PORTS.update(ports)
    create = functools.partial(_create, _DEVICES if ports else None)
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return ports


Pair = tuple[Callable[[Tensor], None], Callable[[Tensor], None]]
"""What sends a tensor to the other process, and what fills one with what comes from there."""


def pair(store: Store, place: int, wait_s: float, lost: Callable[[], bool]) -> Pair:
    """Connect two processes, apart from all groups; `place` is 0 in one and 1 in the other.

    Any thread may use it. Raises TransportError, as does what it returns, after `wait_s` at most,
    or if the other is `lost`.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stub
    options._devices, options._timeout = [_DEVICES[JOINING]], timedelta(seconds=wait_s)
    edge = "a connection for states"
    with Naming(edge):
        group: Any = abandonable(lambda: dist.ProcessGroupGloo(store, place, 2, options), lost)

    def send(tensor: Tensor) -> None:
        with Naming(edge):
            abandonable(group.send([tensor], 1 - place, 0).wait, lost)

    def receive(tensor: Tensor) -> None:
        with Naming(edge):
            abandonable(group.recv([tensor], 1 - place, 0).wait, lost)

    return send, receive


def _create(devices: dict[str, Any] | None, given: Any, traffic: Any) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stub
    device = (
        dist.ProcessGroupGloo.create_default_device()
        if devices is None
        else devices[traffic or _DEFAULT]
    )
    options._devices, options._timeout = [device], given.timeout
    options.global_ranks_in_group = given.global_ranks_in_group
    options.group_name = given.group_id
    return abandonable(
        lambda: dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, options)
    )


def _listening(address: str) -> set[int]:
    """Ports of an address at which this process listens; /proc/net may be hidden from it."""
    return {
        found.getsockname()[1]
        for found in _sockets()
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and found.getsockname()[0] == address
    }


def break_connections(ports: Collection[int]) -> None:
    """Shut this process's connections to and from these ports of its own and others.

    Who waits for a peer wakes up with an error; nothing that torch offers does that. The store,
    whose port may be that of a peer on another machine, stays connected.
    """
    store = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    for found in _sockets():
        with contextlib.suppress(OSError):  # not connected
            ends = [end[:2] for end in (found.getsockname(), found.getpeername())]
            is_store = store in [(host.removeprefix("::ffff:"), str(port)) for host, port in ends]
            if not is_store and any(port in ports for _, port in ends):
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Those of this process that lead to networks; each is for one turn of the loop."""
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        yield found


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(_MOST_DESCRIPTORS)
