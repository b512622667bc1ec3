"""How a rank meets the others: in a store, then in torch's default process group.

One that joins a run under way meets the ranks of its replica alone, then enters the run.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.net.overlay.control import ADDRESS, OverlayError
from thinpipe.launch.net.overlay.ranks import open_ports
from thinpipe.launch.net.ranks import gloo_backend
from thinpipe.launch.net.ranks.handshake import HandshakeError, Lobby, open_store
from thinpipe.launch.net.ranks.network import JOINS, LISTENS_AT, HostNetwork, join_as_rank
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.mesh import Mesh

_NAME, _POLL_S = "run", 0.1
_OPEN, _BEGAN, _NEEDS = "elastic/door/first", "elastic/began", "elastic/needs"
BEATS, _SILENT_S = "beats", 20.0
"""Where ranks of a run that goes on without lost ones count; without it rank 0 has ended."""
PARTS = "parts"
"""Where machines say in the store which part of a replica they bring."""


def meet(
    config: NetworkConfig, rank: int, world: int, lobby: Lobby, *, wait_s: float
) -> tuple[Store, HostNetwork | None]:
    """The store of the run; a rank that nobody did that for joins the run's network first.

    It has to leave that network in the end. `lobby` says that rank 0 is waited for.

    Raises:
        HandshakeError: the machines did not join, or nobody answers where the store should be.
        ValueError: there is no key, or MASTER_ADDR or MASTER_PORT is not set.
    """
    try:
        network = join_as_rank(config, world, limit_s=wait_s, log=print_error)
    except OverlayError as error:
        raise HandshakeError(str(error)) from None
    server = network.server if network is not None else None
    with lobby.connecting() if rank else nullcontext():
        return open_store(rank, wait_s=wait_s, server=server), network


def open_group(store: Store, rank: int, world: int, *, wait_s: float, joining: bool) -> None:
    """Make torch's default group, through this host's relay if there is one.

    `joining`: replicas may come later.

    Raises:
        TransportError: a rank did not come, or a local port is taken.
    """
    ports = gloo_backend.register(os.environ.get(LISTENS_AT), joining=joining)
    try:
        if ADDRESS in os.environ:
            open_ports(store, ports, rank=rank, world=world, wait_s=wait_s)
        timeout = timedelta(seconds=wait_s)
        dist.init_process_group(
            gloo_backend.BACKEND, store=store, rank=rank, world_size=world, timeout=timeout
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank {rank}: connecting failed: {str(error).splitlines()[0]}"
        ) from error


def joins() -> bool:
    """Whether this rank is a newcomer."""
    return JOINS in os.environ


def name_run(met: Store, name: str) -> None:
    """Said by rank 0: the run is in this part of the store."""
    met.set(_NAME, name)


def find_run(met: Store, wait_s: float, say: Callable[[str], None]) -> str:
    """The part of the store that is the run's, once newcomers may come; or HandshakeError."""
    limit_s, waits = time.monotonic() + wait_s, False
    while time.monotonic() < limit_s:
        if met.check([_NAME]):
            name = met.get(_NAME).decode()
            if PrefixStore(name, met).check([_OPEN]):
                return name
        if not waits:
            waits = True
            say(f"the run there has not begun; waiting for it, at most {wait_s:.0f} s")
        time.sleep(_POLL_S)
    raise HandshakeError(
        f"--join: nobody may join the run there yet, after {wait_s:.0f} s: it has not begun, or "
        "ends when a rank is lost (elastic.min_replicas, checkpoint.ram_every)"
    )


def await_end(met: Store) -> None:
    """Wait until rank 0 of the run gives no more sign of life (`launch/run/elastic/beats.py`)."""
    beats, count = PrefixStore(BEATS, PrefixStore(met.get(_NAME).decode(), met)), 0
    since_s = time.monotonic()
    while time.monotonic() < since_s + _SILENT_S:
        before, count = count, beats.add("0", 0)
        since_s = time.monotonic() if count != before else since_s
        time.sleep(_POLL_S)


def come_together(
    run: Store, own: str, ranks: int, whole: int, *, first: bool, wait_s: float
) -> tuple[str, int]:
    """The name of the replica that this machine's `ranks` are part of, and where they begin in it.

    All its ranks call it, with the name that the machine has in the `run`'s store; the `first`
    speaks for it. Waits until rank 0 of the run has found others, with which they are a `whole`
    replica (`launch/run/elastic/parts.py`).

    Raises:
        HandshakeError: they did not come in time.
    """
    store, limit_s = PrefixStore(PARTS, run), time.monotonic() + wait_s
    if first:
        store.set(f"came/{store.add('count', 1)}", json.dumps([own, ranks]))
    while not store.check([f"place/{own}"]):
        if time.monotonic() > limit_s:
            raise HandshakeError(
                f"--join, --ranks = {ranks}: a replica has {whole} ranks, and no machines with the "
                f"others came within {wait_s:.0f} s (pipeline.peer_timeout_s); start them, or join "
                "with all ranks"
            )
        if first:
            store.add(f"waits/{own}", 1)
        time.sleep(_POLL_S)
    name, place = json.loads(store.get(f"place/{own}"))
    return name, place


def tell_began(store: Store, cuts: Sequence[int], steps: int) -> None:
    """Said by rank 0: the cuts that were measured, and how many steps were planned at first."""
    store.set(_BEGAN, json.dumps([cuts, steps]))


def tell_needs(store: Store, device: str, needs: Sequence[Mapping[str, Any]]) -> None:
    """Said by rank 0: the memory of each rank of a pipeline, which takes a while to count, and the
    type of device that it was counted for.
    """
    store.set(_NEEDS, json.dumps({device: needs}))


@dataclass
class Newcomer:
    """What it has of the run."""

    store: Store
    """The run's."""
    own: Store
    """That of the ranks of its replica."""
    say: Callable[[int], None]
    """Tells its supervisor which rank of the run it is."""
    take_part: Callable[[], None]
    """From here on it fails with the run, and the run with it."""
    check: Callable[[], None] = lambda: None
    """Raises if this process was asked to stop."""
    has_entered: bool = False

    @property
    def began(self) -> tuple[list[int], int]:
        """The run's cuts, and how many steps it planned at first."""
        cuts, steps = json.loads(self.store.get(_BEGAN))
        return cuts, steps

    def needs(self, device: str) -> list[dict[str, Any]] | None:
        """What `tell_needs` was given for this type of device, if anything was."""
        told = json.loads(self.store.get(_NEEDS)) if self.store.check([_NEEDS]) else {}
        found: list[dict[str, Any]] | None = told.get(device)
        return found

    def numbers(self, draw: Callable[[int], list[int]], mesh: Mesh) -> list[int]:
        """Those of its replica's ranks in the run; one of them draws."""
        if mesh.rank == 0:
            self.own.set("numbers", json.dumps(draw(mesh.world_size)))
        found: list[int] = json.loads(self.own.get("numbers"))
        return found
