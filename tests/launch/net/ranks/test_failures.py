"""All ranks learn what failed first, and end, whatever they are doing."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from tests.commands import PATIENCE_S
from tests.ranks import run_ranks
from thinpipe.launch.net.ranks.failures import LOST, OUT, Failures, Losses, death_by
from thinpipe.launch.net.ranks.store import StoreLog


def fail(rank: int) -> str:
    """A connection of rank 1's breaks, because rank 0 has an error, which it reports later."""
    failures = Failures(_get_default_store(), f"rank {rank}")
    if rank == 1:
        failures.report("connection broke", cause=False)
    dist.barrier()
    if rank == 0:
        failures.report("no space left", cause=True)
    dist.barrier()
    return failures.first(time.monotonic(), lambda: False)


@pytest.mark.dist
def test_a_cause_comes_before_its_consequences() -> None:
    assert run_ranks(3, fail) == ["rank 0: no space left"] * 3


def test_without_a_cause_the_first_report_counts() -> None:
    store = dist.HashStore()
    for who in ("b", "a"):
        Failures(store, who).report("connection broke", cause=False)
    assert Failures(store, "c").first(0.0, lambda: False) == "b: connection broke"


def test_a_rank_that_its_launcher_ends_does_not_wait_for_a_cause() -> None:
    """The launcher reports what it found killed only when all its ranks are gone."""
    store = dist.HashStore()
    Failures(store, "rank 1").report("connection broke", cause=False)
    asked: list[bool] = []

    def ended() -> bool:
        asked.append(len(asked) > 1)
        return asked[-1]

    first = Failures(store, "rank 1").first(time.monotonic(), ended)
    assert (first, asked) == ("rank 1: connection broke", [False, False, True])
    Failures(store, "the supervisor").report("killed", cause=True)
    first = Failures(store, "rank 2").first(time.monotonic(), lambda: False)
    assert first == "the supervisor: killed"


def test_who_ends_between_two_operations_leaves_no_gap_in_a_log() -> None:
    store = HashStore()
    ending = StoreLog(store, "log")

    class Ends:
        compare_set = ending._store.compare_set

        def add(self, key: str, value: int) -> int:
            if value:
                raise SystemExit
            return int(store.add(f"log/{key}", value))

    ending._store = Ends()  # type: ignore[assignment]
    with pytest.raises(SystemExit):
        ending.add("first")
    log = StoreLog(store, "log")
    log.add("second")
    assert [log.get(1), log.get(2), log.has(3)] == ["first", "second", False]


def test_nobody_waits_for_what_none_will_settle() -> None:
    store, wait_s = dist.HashStore(), 3600.0
    losses, failures = Losses(store), Failures(store, "rank 0")
    assert not losses.is_open
    losses.open(wait_s)
    assert losses.is_open
    losses.settle(1, goes_on=True)
    losses.settle(2, goes_on=False)
    losses.settle(4, goes_on=True, out=True)
    assert losses.settled(1, lambda: False) == LOST
    assert not losses.settled(2, lambda: False)
    assert losses.settled(4, lambda: False) == OUT
    failures.report("no space left", cause=True)
    assert not losses.settled(3, lambda: failures.known() is not None)
    losses.close()
    assert not losses.is_open
    assert not losses.settled(3, lambda: False)


WATCHED = """
    import os, signal, sys, threading
    from thinpipe.launch.net.ranks.failures import Failures, Watch
    from thinpipe.launch.net.ranks.store import connect_store

    store = connect_store(("127.0.0.1", int(sys.argv[1])), wait_s=120)
    watch = Watch(Failures(store, "rank 1"), "rank 1", lambda: " [described]", lambda: False)
    print("waits", flush=True)
    if sys.argv[2] == "handled":
        watch.stand_down()
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join()  # it has met the failure
        os._exit(7)
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reported", "handled", "store gone"])
def test_a_rank_that_waits_is_ended_with_the_reason(how: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", textwrap.dedent(WATCHED), str(store.port), how]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waits\n"
        if how == "store gone":
            del store
        else:
            Failures(store, "rank 0").report("no space left", cause=True)
        _, error = rank.communicate(timeout=PATIENCE_S)
    finally:
        rank.kill()
    if how == "handled":
        assert (rank.returncode, error) == (7, "")
        return
    assert rank.returncode == 1
    expected = {
        "reported": "rank 1: ended because of another rank: rank 0: no space left [described]\n",
        "store gone": "rank 1: the machine that holds the run's store is gone [described]\n",
    }
    assert error.endswith(expected[how])


def test_signals_are_explained() -> None:
    assert death_by(11, out_of_memory=False) == "killed by signal 11 (SIGSEGV)"
    killed, memory = "killed by signal 9 (SIGKILL): ", "this machine ran out of memory (dmesg shows"
    assert death_by(9, out_of_memory=True).startswith(killed + memory)
    assert death_by(9, out_of_memory=False).startswith(f"{killed}if nobody did that, {memory}")
