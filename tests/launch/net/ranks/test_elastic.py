"""Rendezvous that fail, and processes of an agent's that are killed."""

import logging
import os
import signal
import threading
import time

import pytest
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from tests.ports import free_port
from thinpipe.launch.cli import main
from thinpipe.launch.net.ranks import elastic as spawn
from thinpipe.launch.net.ranks import group
from thinpipe.launch.net.ranks.elastic import _Killed, run_local
from thinpipe.launch.net.ranks.failures import LOST, Failures
from thinpipe.launch.net.ranks.group import name_run
from thinpipe.launch.net.ranks.network import openly
from thinpipe.launch.net.ranks.restarts import last_failure


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RendezvousClosedError(), "another machine ended the run"),
        (
            RendezvousConnectionError("reset"),
            "or the machine there ended the run, which --resume continues, also with another "
            "--rdzv: reset",
        ),
        (
            DistNetworkError("got 0 bytes"),
            "which --resume continues, also with another --rdzv: got",
        ),
        (RendezvousTimeoutError(), "RendezvousTimeoutError; run `thinpipe doctor` on each"),
    ],
)
def test_rendezvous_failures_are_explained(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
) -> None:
    def launch(*_: object) -> object:
        raise error

    monkeypatch.setattr(os, "environ", {**os.environ})  # what a launcher sets ends with this test
    monkeypatch.setattr(spawn, "elastic_launch", lambda *_: launch)
    monkeypatch.setattr(spawn.fork_server, "start", lambda: None)
    assert run_local(main, ["train"], 1) == 1
    assert message in capfd.readouterr().err


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_of_an_agent_is_named_here_and_to_the_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store, agent = HashStore(), _Killed("host1")
    last_failure(store, "session", "rank 0")
    told = Failures(PrefixStore("session", store), "rank 1")
    told.report("connection broke", cause=False)
    agent.report_to(store)
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(agent)
    try:
        logs = DefaultLogsSpecs(log_dir=os.devnull)
        started = start_processes("test", be_killed, {0: ()}, {0: {}}, logs, start_method="fork")
        started.wait(60)
    finally:
        logger.removeHandler(agent)
    who = "the supervisor of local rank 0 on host1: killed by signal 9 (SIGKILL): if nobody did"
    assert who in capfd.readouterr().err
    assert (told.known() or "").startswith(who)


def test_the_machine_with_the_store_stays_as_long_as_rank_0_counts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_SILENT_S", 0.8)
    place, store = ("127.0.0.1", free_port()), HashStore()
    name_run(store, "session")
    holder, other = (openly("here", "127.0.0.1", place, holds=holds) for holds in (True, False))
    assert spawn._left_out(other, store) == LOST
    codes = list[int]()
    serves = threading.Thread(target=lambda: codes.append(spawn._left_out(holder, store)))
    beats = PrefixStore(group.BEATS, PrefixStore("session", store))
    beats.add("0", 1)
    serves.start()
    for _ in range(5):
        time.sleep(0.3)
        beats.add("0", 1)
    assert not codes
    serves.join(60)
    assert codes == [LOST]
    said = capfd.readouterr().err.splitlines()
    assert "which goes on without it; --join brings it back" in said[0]
    assert "this command stays until the run has ended" in said[1]
    assert holder.server is not None
    holder.server.close()
