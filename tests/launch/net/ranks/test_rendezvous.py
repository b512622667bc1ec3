"""Machines log that they wait for others, and time out as announced."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.elastic.utils.store import barrier

from tests.launch.test_train import run_file, thinpipe
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.net import machines
from thinpipe.launch.net.machines import several_machines
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.membership import MOST_HOSTS
from thinpipe.launch.net.ranks import fork_server
from thinpipe.launch.net.ranks.network import HOLDS
from thinpipe.launch.net.ranks.rendezvous import Rendezvous, _OneMachineStore
from thinpipe.launch.net.ranks.stopping import Stop

__all__ = ["run_file"]

LIMIT_S = 1
START_S = 45.0
"""Much more than a process takes to start, much less than torch waits for an answer."""


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """Of a program that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_single_machine_times_out(run_file: Path, foreign_port: int, is_foreign: bool) -> None:
    """Another program at the port does not make it wait longer."""
    port = foreign_port if is_foreign else free_port()
    limit = ["--set", f"pipeline.peer_timeout_s={LIMIT_S}"]
    start_s = time.monotonic()
    done = thinpipe(run_file, *limit, "--nnodes", "3", "--rdzv", f"127.0.0.1:{port}")
    assert time.monotonic() - start_s < LIMIT_S + START_S
    assert done.returncode == 1
    limits = f"{LIMIT_S} s (pipeline.peer_timeout_s)"
    first, last = done.stderr.splitlines()
    here = "" if is_foreign else "; the run's store is here"
    assert first == f"waiting for 3 machines at 127.0.0.1:{port}, at most {limits}{here}"
    assert last.startswith(f"error: 3 machines at 127.0.0.1:{port} did not join within {limits}: ")
    why = "(is the port in use by another program?)" if is_foreign else "only 1 joined"
    assert f"{why}; run `thinpipe doctor`" in last


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Rendezvous]]:
    """Has a machine of a name come to a run with so many restarts; there are no ranks."""
    monkeypatch.setattr(fork_server, "revive", lambda: None)
    place, hosts = f"127.0.0.1:{free_port()}", list[Rendezvous]()

    def come(name: str, restarts: int) -> Rendezvous:
        network = several_machines(NetworkConfig(), place, 2, limit_s=60, log=str)
        given: dict[str, Any] = {"limit_s": 1e6, "opened": id, "stop": Stop(), "restarts": restarts}
        hosts.append(Rendezvous(replace(network, host=name), 2, {}, **given))
        return hosts[-1]

    yield come
    for host in hosts:
        host._timer.cancel()


def join(hosts: list[Rendezvous]) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert {met.rank for met in pool.map(Rendezvous.next_rendezvous, hosts)} == {0, 1}


class Slow:
    """A store for which all others are through with letting in while somebody looks."""

    def __init__(self, store: Any) -> None:
        self._store, self.looks = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        if keys[0].startswith("go/") and not found:
            self.looks.set()
            until(lambda: self._store.check(["full"]))
        return found


def test_a_machine_that_is_let_in_while_it_looks_is_not_rejected(
    come: Callable[[str, int], Rendezvous],
) -> None:
    here, there = (come(name, 0) for name in ("h0", "h1"))
    slow: Any = Slow(there._store)
    there._store = slow
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(there.next_rendezvous)
        assert slow.looks.wait(PATIENCE_S)
        assert here.next_rendezvous().rank + joining.result().rank == 1


def test_a_machine_that_does_not_come_back_is_named(come: Callable[[str, int], Rendezvous]) -> None:
    here, _ = hosts = [come(name, 1) for name in ("h0", "h1")]
    join(hosts)
    here._limit_s = 0.1  # the first round's was long enough for any start
    with pytest.raises(RendezvousTimeoutError, match="machine h1 did not come within 0 s"):
        here.next_rendezvous()


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    open_network = NetworkConfig(trusted=True)
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME = eth77: .* it has lo"):
        several_machines(open_network, "192.0.2.1:29500", 2, limit_s=60, log=str)


def test_of_launchers_on_one_machine_the_first_holds_the_store() -> None:
    """And its ranks alone say that the run needs it."""
    place = f"127.0.0.1:{free_port()}"
    both = [several_machines(NetworkConfig(), place, 2, limit_s=60, log=str) for _ in range(2)]
    assert [network.environment[HOLDS] for network in both] == ["1", "0"]
    assert both[0].server is not None
    both[0].server.close()


def test_a_run_of_too_many_machines_is_rejected() -> None:
    with pytest.raises(ValueError, match=f"--nnodes = {MOST_HOSTS + 1}: a run has at most"):
        several_machines(NetworkConfig(), "192.0.2.1:29500", MOST_HOSTS + 1, limit_s=60, log=str)


def test_who_joins_where_no_run_answers_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after the time that ranks wait for each other."""
    monkeypatch.setattr(machines, "_ANSWERS_S", 1.2)
    place, said = f"127.0.0.1:{free_port()}", list[str]()
    with pytest.raises(OverlayError, match=rf"no run answers at {place} \(Connection refused\)"):
        several_machines(NetworkConfig(), place, 1, limit_s=300, log=said.append, joins="now")
    assert said == [f"no run answers at {place} yet; trying for 1 s"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_machine_that_is_started_twice_does_not_harm_the_run(
    restarts: int, come: Callable[[str, int], Rendezvous]
) -> None:
    """Only where the run starts again after failures it may be one that has come back."""
    hosts = [come(name, restarts) for name in ("h0", "h1")]
    join(hosts)
    again = come("h1", restarts)
    if restarts == 0:
        with pytest.raises(RendezvousTimeoutError, match=r"2 machines already \((h0, h1|h1, h0)\)"):
            again.next_rendezvous()
    else:
        again._store.add("posts", 1)
    for host in hosts:
        host._looked_s = 0.0
        assert host.num_nodes_waiting() == restarts


@pytest.mark.parametrize("left", [0, 1])
def test_a_killed_launcher_is_not_waited_for_forever(left: int) -> None:
    """One that has left is not waited for at all, and a third one that ends in time is."""
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [_OneMachineStore("round1", tcp.clone(), 3, lambda: left) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        waits = [
            threads.submit(barrier, store, 3, _TERMINAL_STATE_SYNC_ID, 60 if left else 0.3)
            for store in stores
        ]
        assert [wait.result(PATIENCE_S) for wait in waits] == [None, None]
