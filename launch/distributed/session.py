"""One rank's place in a run: rendezvous, handshake, process groups; and how it ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.distributed import gloo_backend
from thinpipe.launch.distributed.handshake import (
    HandshakeError,
    agree,
    first_failure,
    fresh_store,
    open_store,
    report_failure,
    versions,
)
from thinpipe.launch.distributed.network import LISTENS_AT, HostNetwork, join_as_rank
from thinpipe.launch.overlay.control import ADDRESS as OVERLAY
from thinpipe.launch.overlay.control import Client, OverlayError
from thinpipe.launch.overlay.ranks import open_ports
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.gloo_peers import CHUNK_NBYTES
from thinpipe.pipeline.comm.transport import Transport
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.wire.header import DesyncError

_TERMINATION_GRACE_S = 5.0


@dataclass(frozen=True)
class Session:
    """A rank's connection to the others."""

    store: Store
    transport: Transport
    run_id: int
    local_rank: int

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands."""
        return self.transport.mesh

    @property
    def writes_run_folder(self) -> bool:
        """Whether this rank writes metrics and report."""
        return self.mesh.rank == 0


class PeerError(RuntimeError):
    """The run cannot continue; the message names the edge that failed, here and on other ranks."""


class TerminatedError(Exception):
    """SIGTERM: someone asked this rank to stop."""


class StopFlag:
    """Set by SIGTERM. A rank that is blocked and does not see it is ended after a few seconds.

    Raising from the handler would hide the failure of a peer, of which SIGTERM is often the echo.
    Python runs no handler while the main thread is inside a C++ call, which waits for peers are:
    so a thread reads the number that the interpreter writes to a pipe at once.
    """

    def __init__(self) -> None:
        self._set = False
        numbers, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._watch, args=(numbers,), daemon=True).start()

    def check(self) -> None:
        """Stop here if asked to.

        Raises:
            TerminatedError: the flag is set.
        """
        if self._set:
            raise TerminatedError

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._set = True

    def _watch(self, numbers: int) -> None:
        """End the process if the main thread has not done so in time."""
        while signal.SIGTERM not in os.read(numbers, 64):
            pass
        self._set = True
        time.sleep(_TERMINATION_GRACE_S)
        os._exit(128 + signal.SIGTERM)


@contextmanager
def join(config: RunConfig, facts: Mapping[str, Any], problem: str | None) -> Iterator[Session]:
    """Meet the other ranks (environment as set by torchrun) and leave them again.

    `problem` is what keeps this rank from starting; every rank raises it.

    Raises:
        HandshakeError: ranks differ in config, data or version, one has a problem or did not join.
        PeerError: a peer failed while the session was in use.
    """
    world = int(os.environ["WORLD_SIZE"])
    if world != config.world_size and problem is None:
        problem = (
            f"{world} processes were started, but {config.pipeline.stages} stages "
            f"(pipeline.cuts) with pipeline.replicas = {config.pipeline.replicas} need "
            f"{config.world_size}; "
            f"start {config.world_size} (torchrun: nnodes x nproc-per-node)"
        )
    rank, wait_s = int(os.environ["RANK"]), config.pipeline.peer_timeout_s
    network = _join_network(config, world, wait_s)
    server = network.server if network is not None else None
    opened = open_store(rank, wait_s=wait_s, server=server)
    store = fresh_store(opened, rank, world, wait_s=wait_s)
    facts = {"config": config.shared(), "versions": versions(), **facts}
    run_id = agree(store, rank, world, facts, problem=problem, wait_s=wait_s)
    timeout = timedelta(seconds=wait_s)
    try:
        _open_network(store, rank, world, wait_s=wait_s)
        dist.init_process_group(
            gloo_backend.BACKEND, store=store, rank=rank, world_size=world, timeout=timeout
        )
        transport = GlooTransport(
            config.pipeline.pipeline_ranks,
            config.pipeline.replicas,
            timeout_s=wait_s,
            chunk_nbytes=_chunk_nbytes(config),
        )
        yield Session(store, transport, run_id, int(os.environ.get("LOCAL_RANK", "0")))
        transport.close()
    except Exception as error:
        account = _report(store, rank, world, error)
        if isinstance(error, DesyncError | TransportError):
            raise PeerError(account) from error
        raise
    dist.destroy_process_group()


def _join_network(config: RunConfig, world: int, wait_s: float) -> HostNetwork | None:
    def log(text: str) -> None:
        os.write(2, f"{text}\n".encode())

    try:
        return join_as_rank(config.network, world, limit_s=wait_s, log=log)
    except OverlayError as error:
        raise HandshakeError(str(error)) from None


def _open_network(store: Store, rank: int, world: int, *, wait_s: float) -> None:
    """Choose where gloo listens, and have the host's carrier let others in, if there is one."""
    ports = gloo_backend.register(os.environ.get(LISTENS_AT))
    carrier = os.environ.get(OVERLAY)
    if carrier is None:
        return
    try:
        open_ports(Client.connect(carrier), store, ports, rank=rank, world=world, wait_s=wait_s)
    except RuntimeError as error:
        raise TransportError(f"rank {rank}: {str(error).splitlines()[0]}") from error


def _chunk_nbytes(config: RunConfig) -> int:
    options = config.method_options
    return 1024 * options.chunk_kib if isinstance(options, ExchangeOptions) else CHUNK_NBYTES


def _report(store: Store, rank: int, world: int, error: Exception) -> str:
    """This rank's account of a failure, and that of the rank that failed before all others."""
    own = str(error).strip()
    try:
        report_failure(store, rank, own)
        first, message = first_failure(store, world)
    except RuntimeError:  # the store's host is gone as well
        return own
    return own if first == rank else f"{own} [first failure: rank {first}: {message}]"
