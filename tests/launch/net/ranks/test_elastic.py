"""What a rank's process is given: compute threads, and how it keeps freed memory."""

import os
import subprocess
import sys

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from thinpipe.launch.cli import main
from thinpipe.launch.net.ranks import elastic as spawn
from thinpipe.launch.net.ranks.elastic import (
    has_spare_core,
    keep_freed_memory,
    rank_threads,
    run_local,
    threads_per_rank,
    usable_cores,
)

_FAULTS = """
import resource, sys, torch
from thinpipe.launch.net.ranks.elastic import keep_freed_memory
changed = keep_freed_memory() if "keep" in sys.argv else None
torch.set_num_threads(1)
x = torch.ones(12 << 20)
for turn in range(24):
    if turn == 20:  # at some addresses glibc takes a few blocks more before it reuses one
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    y = x + 1
    del y
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> tuple[str, int]:
    """Result of `keep_freed_memory`, and page faults of four additions of 48 MB."""
    known = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS, *arguments],
        env=known,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_large_tensors_reuse_memory() -> None:
    _, before = faults()
    kept, after = faults("keep")
    assert kept == "True"
    assert after < 0.1 * before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


@pytest.mark.parametrize(
    ("cores", "processes", "threads"),
    [(1, 3, 1), (2, 1, 2), (2, 2, 1), (8, 2, 3), (8, 3, 2), (16, 1, 15), (96, 8, 11)],
)
def test_ranks_leave_a_core_to_messages_where_there_are_enough(
    cores: int, processes: int, threads: int
) -> None:
    assert threads_per_rank(cores, processes) == threads


@pytest.mark.parametrize(
    ("setting", "threads"),
    [("3", 3), ("4,2", 4), (" 2 ", 2), ("", None), ("0", None), ("-1", None), ("many", None)],
)
def test_threads_are_those_that_openmp_is_told(
    monkeypatch: pytest.MonkeyPatch, setting: str, threads: int | None
) -> None:
    """It ignores what is no number."""
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert rank_threads(1) == (threads or threads_per_rank(usable_cores(), 1))


@pytest.mark.parametrize(
    ("cores", "processes", "threads", "spare"),
    [(1, 1, 1, False), (2, 1, 1, True), (3, 2, 1, False), (4, 2, 1, True), (2, 1, 2, False)],
)
def test_a_core_is_to_spare_where_compute_threads_leave_each_rank_one(
    cores: int, processes: int, threads: int, spare: bool
) -> None:
    assert has_spare_core(cores, processes, threads) == spare
    given = threads_per_rank(8 * cores, processes)
    assert has_spare_core(8 * cores, processes, given)  # what ranks are given leaves one


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RendezvousClosedError(), "another machine ended the run"),
        (
            RendezvousConnectionError("reset"),
            "or the machine there ended the run: reset",
        ),
        (RendezvousTimeoutError(), "RendezvousTimeoutError; run `thinpipe doctor` on each"),
    ],
)
def test_rendezvous_failures_are_explained(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: RendezvousError,
    message: str,
) -> None:
    def launch(*_: object) -> object:
        raise error

    monkeypatch.setattr(os, "environ", {**os.environ})  # what a launcher sets ends with this test
    monkeypatch.setattr(spawn, "elastic_launch", lambda *_: launch)
    monkeypatch.setattr(spawn.fork_server, "start", lambda: None)
    assert run_local(main, ["train"], 1) == 1
    assert message in capfd.readouterr().err
