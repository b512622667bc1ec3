"""How a rank ends when it is asked to."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.commands import PATIENCE_S
from thinpipe.launch.net.ranks.network import JOINS
from thinpipe.launch.net.ranks.session import _TERMINATION_GRACE_S, TerminatedError

pytestmark = pytest.mark.dist

BLOCKED = """
    import os, sys, threading, time, torch
    import torch.distributed as dist
    from thinpipe.launch.net.ranks.session import StopFlag

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    stop = StopFlag()
    work = dist.irecv(torch.empty(1), src=1 - rank)
    main = threading.main_thread().ident

    def wait():
        work.wait()  # for what nobody sends

    def say():
        inside = False  # nothing else in that line lets other threads run
        while not inside:
            time.sleep(0.01)
            frame = sys._current_frames()[main]
            code = frame.f_code
            inside = code.co_name == "wait" and frame.f_lineno > code.co_firstlineno
        print("waits", flush=True)

    threading.Thread(target=say, daemon=True).start()
    wait()
"""

LOOPS = """
    import time
    from thinpipe.launch.net.ranks.session import StopFlag, TerminatedError

    stop = StopFlag()
    print("waits", flush=True)
    while True:
        time.sleep(0.05)
        try:
            stop.check()
        except TerminatedError:
            raise SystemExit("stopped in order")
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_rank_that_waits_for_its_peer_ends_after_the_grace(tmp_path: Path) -> None:
    ranks = [start(BLOCKED, tmp_path / "store", rank) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "waits\n"
        ranks[0].send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        assert ranks[0].wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert time.monotonic() - start_s > _TERMINATION_GRACE_S - 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_a_rank_that_looks_ends_in_order_also_when_asked_twice() -> None:
    rank = start(LOOPS)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waits\n"
        for _ in range(2):
            rank.send_signal(signal.SIGTERM)
        reported, _ = rank.communicate(timeout=PATIENCE_S)
    finally:
        rank.kill()
        rank.wait()
    assert (rank.returncode, reported) == (1, "stopped in order\n")


@pytest.mark.parametrize(
    ("number", "world", "joins", "code"),
    [(None, 4, False, 143), (None, 8, False, 1), (None, 4, True, 1), (2, 8, True, 130)],
)
def test_a_machine_that_was_asked_to_stop_ends_with_the_signal(
    monkeypatch: pytest.MonkeyPatch, number: int | None, world: int, joins: bool, code: int
) -> None:
    """Of one with all four ranks of a run each was asked; of a newcomer the others were."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv(JOINS, raising=False)
    if joins:
        monkeypatch.setenv(JOINS, "newcomer")
    assert TerminatedError(number).code == code
