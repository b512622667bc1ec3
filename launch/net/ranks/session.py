"""One rank's place in a run: rendezvous, handshake, process groups; and how it ends."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.host.device import local_rank
from thinpipe.launch.host.packages import versions
from thinpipe.launch.host.signals import STOP_ALL, handled
from thinpipe.launch.host.terminal import end_now, print_error
from thinpipe.launch.net.overlay.ranks import broken_links
from thinpipe.launch.net.ranks.failures import Failures, Watch, end_soon
from thinpipe.launch.net.ranks.group import (
    Newcomer,
    come_together,
    find_run,
    meet,
    name_run,
    open_group,
)
from thinpipe.launch.net.ranks.handshake import Lobby, agree, agree_with, fresh_name, store_address
from thinpipe.launch.net.ranks.network import JOINS
from thinpipe.launch.net.ranks.restarts import last_failure, restart_words
from thinpipe.launch.net.ranks.stopping import wakeup_pipe
from thinpipe.launch.net.ranks.store import connect_store
from thinpipe.launch.net.ranks.supervisor import announce
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.transport import Transport
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.wire.header import DesyncError

_TERMINATION_GRACE_S = 5.0  # before there is anything to save; then it is checkpoint.grace_s
_BEFORE = "before"
_CONNECT_S = 60.0  # to a store that is there: only a busy machine takes long
_ANSWER_S = 2.0
"""After the failure of a peer, of which SIGTERM is the echo, this process does not live as long."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_ALL)

SHOW = "THINPIPE_SHOW"
"""Environment variable: the local rank that shows progress, -1 for none."""


def speaks() -> bool:
    """Whether this rank tells the user of its host what goes on, if it is no failure."""
    return local_rank() == 0 and os.environ.get(SHOW) != "-1"


def _transport(mesh: Mesh, wait_s: float) -> GlooTransport:
    return GlooTransport(mesh.pipeline_ranks, mesh.replicas, timeout_s=wait_s, shards=mesh.shards)


def tell(text: str) -> None:
    """Say something to the user of this host, if this rank speaks."""
    if speaks():
        print_error(text)


def tell_stop(step: int) -> None:
    """Say after which step all ranks stop."""
    tell(f"asked to stop: step {step} is saved, then the run ends")


@dataclass(frozen=True)
class Session:
    """A rank's connection to the others."""

    first_store: Store
    transport: Transport
    run_id: int
    local_rank: int
    restart: str | None = None
    """Which restart this is, and what ended the attempt before, in words."""
    apart: Callable[[], Store] | None = None
    """Makes another connection to the store, for a thread that may be blocked."""
    newcomer: Newcomer | None = None
    """Until it has entered the run, the other ranks are those of its replica."""

    @property
    def store(self) -> Store:
        """What all of its ranks read and write."""
        entered = self.newcomer is not None and self.newcomer.has_entered
        return self.newcomer.store if entered and self.newcomer else self.first_store

    @property
    def mesh(self) -> Mesh:
        return self.transport.mesh

    @property
    def writes_run_folder(self) -> bool:
        return self.mesh.rank == 0 and self.newcomer is None


class PeerError(RuntimeError):
    """The run cannot continue; the message names the edge that failed, here and on other ranks."""


class TerminatedError(Exception):
    """The run was asked to stop; `code` is what this process exits with."""

    def __init__(self, number: int | None, *, has_begun: bool = True) -> None:
        """`number` is the signal that came here, None if it came to another rank."""
        super().__init__("asked to stop" if number else "another rank was asked to stop")
        self.has_begun = has_begun
        """Whether this rank has trained."""
        all_here = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        if number is None and all_here and JOINS not in os.environ:
            number = signal.SIGTERM  # it came to this machine
        self.code = 1 if number is None else 128 + number


class StopFlag:
    """Set by SIGTERM and SIGHUP, and by Ctrl-C while training, unless they are ignored.

    All ranks then agree on the step after which they stop. One that does not end in time is ended.
    Raising from the handler would hide the failure of a peer, of which SIGTERM is often the echo.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal, once it has come; SIGTERM for `STOP_ALL`."""
        self._whole = False
        self._stop: Callable[[bool], threading.Event] | None = None
        self._grace_s = _TERMINATION_GRACE_S
        numbers, _ = wakeup_pipe()
        for number in handled(_STOPS):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, args=(numbers,), daemon=True).start()

    def begin_training(self, grace_s: float, stop: Callable[[bool], threading.Event]) -> None:
        """From here on there is something to save, within the grace period.

        `stop` asks all ranks to stop, with False only this machine's if the others can go on; its
        event is set once they know when.
        """
        self._grace_s, self._stop = grace_s, stop
        if self.number is not None:
            stop(self._whole)

    def is_set(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        """Stop here, by TerminatedError, if asked to, as long as there is nothing to save."""
        if self.number is not None and self._stop is None:
            raise TerminatedError(self.number, has_begun=False)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._stop is None:
            raise KeyboardInterrupt
        self._take(number)

    def _watch(self, numbers: int) -> None:
        """End the process if the main thread has not done so in time."""
        while not (asked := [n for n in os.read(numbers, 64) if self._counts(n)]):
            pass
        number, limit_s = self._take(asked[0]), time.monotonic() + self._grace_s
        if self._stop is not None and not self._stop(self._whole).wait(_ANSWER_S):
            tell(f"asked to stop: waiting for the other ranks, at most {self._grace_s:.0f} s")
        while (left_s := limit_s - time.monotonic()) > 0:
            ready, _, _ = select.select([numbers], [], [], left_s)
            if ready and STOP_ALL in os.read(numbers, 64) and self._stop is not None:
                self._stop(True)
        late = (
            f"ended after {self._grace_s:.0f} s (checkpoint.grace_s), before all was done: the "
            "run is at its last checkpoint"
        )
        end_now(128 + number, late if self._stop is not None and speaks() else "")

    def _take(self, number: int) -> int:
        """Remember the first signal; as which number it counts."""
        self._whole |= number == STOP_ALL
        self.number = self.number or (signal.SIGTERM if number == STOP_ALL else number)
        return self.number

    def _counts(self, number: int) -> bool:
        return number in _STOPS and (number != signal.SIGINT or self._stop is not None)


@contextmanager
def join(
    network_config: NetworkConfig,
    mesh: Mesh,
    facts: Mapping[str, Any],
    problem: str | None,
    *,
    wait_s: float,
    ended: Callable[[], bool],
    joining: bool = False,
) -> Iterator[Session]:
    """Meet the other ranks (environment as set by torchrun) and leave them again.

    `facts` must be equal on all; `problem` is what keeps this rank from starting; every rank raises
    it. `ended` says whether this process was asked to stop, `joining` that replicas may come later.

    Raises:
        HandshakeError: ranks differ in config, data or version, one has a problem or did not join.
        PeerError: a peer failed while the session was in use.
    """
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    token = os.environ.get(JOINS)
    is_part = token is not None and world < mesh.world_size
    if world != mesh.world_size and not is_part and problem is None:
        problem = _wrong_number(world, mesh)
    lobby = Lobby(mesh.world_size if is_part else world, wait_s, tell, problem)
    met, network = meet(network_config, rank, world, lobby, wait_s=wait_s)
    run = find_run(met, wait_s, tell) if token else ""
    if token and is_part:
        token, mesh = _be_part(PrefixStore(run, met), token, mesh, rank, world, wait_s)
        rank, world = mesh.rank, mesh.world_size
    prefix = f"{run}/{token}/" if token else ""
    name = prefix + fresh_name(PrefixStore(prefix, met), rank, world, lobby, wait_s=wait_s)
    store = PrefixStore(name, met)
    place, host = store_address(), network_config.own_name()  # `meet` may have changed both
    who = f"rank {rank} on {host}"
    announce(place, name, host, rank)
    if rank == 0:
        store.set(_BEFORE, "" if token else last_failure(met, name, who))
    facts = {"versions": versions(), **facts}
    run_id = agree(store, rank, world, facts, problem=problem, wait_s=wait_s)
    failures = _Reports(met, name, place, who, ended)
    newcomer = None
    if token:
        of_run, say = PrefixStore(run, met), partial(announce, place, run, host)
        run_id = agree_with(of_run, facts)
        newcomer = Newcomer(of_run, store, say, partial(failures.move, run))
    elif rank == 0:
        name_run(met, name)
    try:
        open_group(store, rank, world, wait_s=wait_s, joining=joining)
        transport = _transport(mesh, wait_s)
        restart = restart_words(store.get(_BEFORE).decode())
        yield Session(store, transport, run_id, local_rank(), restart, failures.apart, newcomer)
        transport.close()
    except Exception as error:
        failures.end(error)
        raise
    failures.watch.stand_down()
    dist.destroy_process_group()
    if network is not None:
        network.close()


def _be_part(
    run: Store, token: str, mesh: Mesh, rank: int, ranks: int, wait_s: float
) -> tuple[str, Mesh]:
    """The name of the replica that this machine's ranks are part of, and the place of this one."""
    whole = mesh.world_size
    tell(f"waiting for machines with the rest of a replica ({whole - ranks} of {whole} ranks)")
    name, first = come_together(run, token, ranks, whole, first=rank == 0, wait_s=wait_s)
    os.environ |= {"RANK": str(first + rank), "WORLD_SIZE": str(whole)}
    return name, replace(mesh, rank=first + rank)


class _Reports:
    """Where this rank reports failures, and what ends it if another rank does."""

    def __init__(
        self, met: Store, name: str, place: tuple[str, int], who: str, ended: Callable[[], bool]
    ) -> None:
        self._met, self._place, self._who, self._ended = met, place, who, ended
        self._rank = who.partition(" on ")[0]
        self._begin(name)

    def move(self, name: str) -> None:
        """From here on it belongs to those in another part of the store."""
        self.watch.stand_down()
        self._begin(name)

    def apart(self) -> Store:
        return PrefixStore(self._name, connect_store(self._place, wait_s=_CONNECT_S))

    def end(self, error: Exception) -> None:
        """Tell the other ranks what failed here."""
        since_s = self.watch.stand_down()
        end_soon()
        if isinstance(error, DesyncError | TransportError):
            raise PeerError(self._report(error, since_s)) from error
        if not isinstance(error, TerminatedError):  # which is often the echo of a failure
            with contextlib.suppress(RuntimeError):
                self._all.report(_in_words(error), cause=True)

    def _report(self, error: Exception, since_s: float) -> str:
        own = f"{str(error).strip()}{broken_links()}"
        print_error(f"{self._rank}: {own}")
        try:
            self._all.report(own, cause=not isinstance(error, TransportError))
            first = self._all.first(since_s, self._ended)
        except RuntimeError:
            return "the run's store is gone as well, so what failed first is not known here"
        return "" if first == f"{self._who}: {own}" else f"first failure: {first}"

    def _begin(self, name: str) -> None:
        self._name, self._all = name, Failures(PrefixStore(name, self._met), self._who)
        apart = Failures(self.apart(), self._who)
        self.watch = Watch(apart, self._rank, broken_links, self._ended)


def _wrong_number(world: int, mesh: Mesh) -> str:
    needed = mesh.world_size
    shards = f" and pipeline.shards = {mesh.shards}" if mesh.shards > 1 else ""
    return (
        f"{world} processes were started, but {mesh.pipeline_ranks} ranks per pipeline "
        f"(pipeline.cuts) with pipeline.replicas = {mesh.replicas}{shards} need {needed}; "
        f"start {needed} (--ranks of all machines together; torchrun: nnodes x nproc-per-node)"
    )


def _in_words(error: Exception) -> str:
    """The message, with the kind of error where that says more."""
    text, kind = str(error).strip(), type(error).__name__
    says_it = isinstance(error, ValueError | OSError | RuntimeError | ImportError)
    return text if text and says_it else f"{kind}: {text}" if text else kind
