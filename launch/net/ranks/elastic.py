"""Starts a run's ranks on this machine, all or its share, with torchrun's elastic agent."""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinpipe.launch.config.cli_options import USAGE_ERROR
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.host.resources import rank_threads
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.net.machines import Joins, several_machines
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.ranks import fork_server, rendezvous
from thinpipe.launch.net.ranks.failures import LOST, OUT, death_by
from thinpipe.launch.net.ranks.group import await_end
from thinpipe.launch.net.ranks.network import HostNetwork, one_machine
from thinpipe.launch.net.ranks.restarts import STOPPED, report_killed
from thinpipe.launch.net.ranks.stopping import Stop

_LOCAL_JOIN_S = 60.0  # one machine waits for no other; its own store may be slow to open
_LEFT_OUT = "this machine is out of the run, which goes on without it; --join brings it back"
_HOLDS = (
    "this machine is out of the run, which goes on; its store is here (--rdzv): this command stays "
    "until the run has ended, and Ctrl-C ends the run"
)


@dataclass(frozen=True)
class Nodes:
    """The machines of a run: how many, and the `host:port` of their rendezvous.

    After a failure all ranks are restarted up to `max_restarts` times; machines wait `join_s`
    seconds for each other. `placed` names the host of each rank; without it, hosts are numbered.
    `joins`: this one comes to a run that is under way.
    """

    count: int
    endpoint: str
    max_restarts: int
    join_s: float
    placed: tuple[str, ...] = ()
    joins: Joins | None = None


def run_local(
    main: Callable[[], None], arguments: Sequence[str], processes: int, *, max_restarts: int = 0
) -> int:
    """Call `main` with a command line's arguments as that many ranks; return the exit code.

    The ranks talk over loopback. If one fails, the others are ended, and all are restarted up to
    `max_restarts` times; if this process is killed, they end too.
    """
    nodes = Nodes(1, "", max_restarts, _LOCAL_JOIN_S)
    with Stop() as stop:
        return _launch(one_machine(), nodes, processes, main, arguments, stop)


def run_node(
    main: Callable[[], None],
    arguments: Sequence[str],
    processes: int,
    nodes: Nodes,
    config: NetworkConfig,
) -> int:
    """Like `run_local`, for this machine's `processes` ranks of a run on several.

    Raises:
        ValueError: there is no key, the rendezvous host cannot be resolved or reached, or this
            machine has no place in the run.
    """
    own = config.own_name()
    if nodes.placed and own not in nodes.placed:
        raise ValueError(
            f"pipeline.placement: this machine is {own!r} (network.name), which it does not name; "
            f"it has {', '.join(dict.fromkeys(nodes.placed))}: correct one of the two"
        )
    fork_server.start()  # imports while the others join
    with Stop() as stop:
        try:
            network = several_machines(
                config,
                nodes.endpoint,
                nodes.count,
                limit_s=nodes.join_s,
                log=print_error,
                expected=list(dict.fromkeys(nodes.placed)),
                joins=nodes.joins,
            )
        except OverlayError as error:
            print_error(f"error: {error}; run `thinpipe doctor` on each")
            return 1
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        newcomer = secrets.token_hex(8) if nodes.joins else ""
        host = own if network.overlay is None else network.overlay.name
        if host != own:
            print_error(f"{own} takes the place of {host}, which is lost, and its name in the run")
        network = replace(network, host=host, placed=nodes.placed, newcomer=newcomer)
        try:
            return _launch(network, nodes, processes, main, arguments, stop)
        finally:
            network.close()


def _launch(
    network: HostNetwork,
    nodes: Nodes,
    processes: int,
    main: Callable[[], None],
    arguments: Sequence[str],
    stop: Stop,
) -> int:
    os.environ["OMP_NUM_THREADS"] = str(rank_threads(processes))
    killed = _Killed(network.host or socket.gethostname())
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).addHandler(killed)
        logging.getLogger(name).propagate = False  # child loggers too, whatever their level
    fork_server.start()
    rendezvous.register()
    environment = dict(network.environment)  # of ranks; each rendezvous adds its number
    meeting = partial(
        rendezvous.Rendezvous,
        network,
        nodes.count,
        environment,
        limit_s=nodes.join_s,
        opened=killed.report_to,
        stop=stop,
        restarts=nodes.max_restarts,
    )
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=processes,
        run_id="thinpipe",
        rdzv_backend=rendezvous.BACKEND,
        rdzv_configs={"make": meeting},
        max_restarts=nodes.max_restarts,
        start_method=fork_server.START_METHOD,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write none; no folder in /tmp
        signals_to_handle="",  # `stop` handles them; torch's would catch what nohup ignores
    )
    try:
        lost = elastic_launch(config, _run_rank)(main, environment, *arguments)
    except ChildFailedError as error:
        return _failed(error, network, killed.store)
    except rendezvous.RejectedError as rejected:
        print_error(f"not restarted: {rejected}")
        return 1 if str(rejected) == STOPPED else USAGE_ERROR
    except RendezvousClosedError:
        print_error("error: another machine ended the run; see its output")
        return 1
    except (RendezvousError, DistError) as error:  # torch's agent asks the store by itself, too
        print_error(f"error: {_why_not_met(error, nodes, network)}")
        return 1
    except SignalException as stopped:
        if killed.store is not None:
            rendezvous.tell_left(killed.store)
        return 128 + int(stopped.sigval)
    return _left_out(network, killed.store) if all(lost.values()) else 0


def _left_out(network: HostNetwork, store: Store | None) -> int:
    """What this machine ends with, as the ranks of others go on without its own."""
    if network.server is None or store is None:
        print_error(f"error: {_LEFT_OUT}")
        return LOST
    print_error(_HOLDS)
    try:
        await_end(store)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return LOST


def _failed(error: ChildFailedError, network: HostNetwork, store: Store | None) -> int:
    """What this machine ends with, as ranks have failed."""
    if fork_server.is_gone():
        print_error(f"error: {fork_server.GONE}; --resume continues from the last checkpoint")
    codes = [failure.exitcode for failure in error.failures.values()]
    if OUT in codes:
        return _left_out(network, store)
    return next((code for code in codes if code > 0), 1)


def _why_not_met(error: Exception, nodes: Nodes, network: HostNetwork) -> str:
    if network.is_gone:
        return (
            "the process that connects this machine with the others has ended: it was killed, or "
            "this machine ran out of memory (dmesg shows it); run the command again"
        )
    failed = f"{nodes.count} machines did not all join at {nodes.endpoint}"
    # at the start, or after its host ended
    if isinstance(error, RendezvousConnectionError | DistError):
        failed = (
            f"{nodes.endpoint} cannot be reached, or the machine there ended the run, which "
            "--resume continues, also with another --rdzv"
        )
    reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    return f"{failed}: {reason}; run `thinpipe doctor` on each"


def _run_rank(main: Callable[[], None], environment: Mapping[str, str], *arguments: str) -> bool:
    from thinpipe.launch.net.ranks.forked import run_rank  # only ranks and their server may

    return run_rank(main, environment, *arguments)


class _Killed(logging.Handler):
    """Says which supervisor was killed, here and to other ranks; ranks say better what else is
    logged.
    """

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        self.store: Store | None = None

    def report_to(self, store: Store) -> None:
        self.store = store

    def emit(self, record: logging.LogRecord) -> None:
        code, rank = (*(record.args or ()), None, None)[:2]
        if isinstance(code, int) and code < 0:
            process = f"the supervisor of local rank {rank} on {self._host}"
            how = death_by(-code, out_of_memory=False)
            print_error(f"{process}: {how}")
            if self.store is not None:
                report_killed(self.store, process, how)
