"""How a rank meets the others: in a store, then in torch's default process group."""

import os
from contextlib import nullcontext
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.net.overlay.control import ADDRESS, Client, OverlayError
from thinpipe.launch.net.overlay.ranks import open_ports
from thinpipe.launch.net.ranks import gloo_backend
from thinpipe.launch.net.ranks.handshake import HandshakeError, Lobby, open_store
from thinpipe.launch.net.ranks.network import LISTENS_AT, HostNetwork, join_as_rank
from thinpipe.pipeline.comm.errors import TransportError


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


def open_group(store: Store, rank: int, world: int, *, wait_s: float) -> None:
    """Make torch's default group, through this host's relay if there is one.

    Raises:
        TransportError: a rank did not come, or a local port is taken.
    """
    ports = gloo_backend.register(os.environ.get(LISTENS_AT))
    relay = os.environ.get(ADDRESS)
    try:
        if relay is not None:
            open_ports(Client(relay), store, ports, rank=rank, world=world, wait_s=wait_s)
        timeout = timedelta(seconds=wait_s)
        dist.init_process_group(
            gloo_backend.BACKEND, store=store, rank=rank, world_size=world, timeout=timeout
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank {rank}: connecting failed: {str(error).splitlines()[0]}"
        ) from error
