"""A rank's supervisor exits as the rank did, and says what killed it."""

import os
import signal
import subprocess
import sys

import pytest
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from tests.commands import PATIENCE_S
from tests.waiting import until
from thinpipe.launch.net.ranks.failures import OUT, Losses

pytestmark = pytest.mark.slow

SUPERVISED = """
import os, signal, sys, time
from thinpipe.launch.net.ranks.supervisor import supervise

def be_rank():
    print("runs", flush=True)
    {body}
    os._exit(0)

try:
    supervise(be_rank)
finally:
    print("goes on", flush=True)
"""


def start(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISED.format(body=body)],
        env={**os.environ, "RANK": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("os._exit(7)", 7, ""),
        ("os.kill(os.getpid(), 9)", 1, ": killed by signal 9 (SIGKILL): "),
        ("os.kill(os.getpid(), 6)", 1, ": killed by signal 6 (SIGABRT)\n"),
        # a child of the rank's still holds the pipe by which the rank would have announced itself
        ("os.fork() and os.kill(os.getpid(), 9) or input()", 1, ": killed by signal 9 "),
    ],
)
def test_the_end_of_a_rank_is_passed_on(body: str, code: int, said: str) -> None:
    with start(body) as supervisor:
        assert supervisor.wait(PATIENCE_S) == code
        assert supervisor.stderr is not None
        line = supervisor.stderr.readline()
        assert line.startswith(f"rank 3{said}") or not said


@pytest.mark.parametrize("asked", [True, False])
def test_who_was_asked_to_stop_does_not_go_on_after_its_rank(asked: bool) -> None:
    """torch's agent, which asked, reads no results any more: it would wait half a minute."""
    ready = "time.sleep(1); print(1, flush=True)"
    ends = f"signal.signal(15, lambda *_: os._exit(0)); {ready}; time.sleep(60)"
    with start(ends if asked else ready) as supervisor:
        assert supervisor.stdout is not None
        assert [supervisor.stdout.readline() for _ in range(2)] == ["runs\n", "1\n"]
        if asked:
            supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(PATIENCE_S) == 0
        assert ("goes on" in supervisor.stdout.read()) == (not asked)


def test_signals_reach_the_rank_and_are_not_reported() -> None:
    supervisor = start("time.sleep(60)")
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "runs\n"
    supervisor.send_signal(signal.SIGTERM)
    _, error = supervisor.communicate(timeout=PATIENCE_S)
    assert (supervisor.returncode, error) == (-signal.SIGTERM, "")


def announced(then: str) -> tuple[Losses, subprocess.Popen[str]]:
    """Losses of a run whose rank 3 says who it is and then does that, and its supervisor."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses = Losses(PrefixStore("run", store))
    losses.open(PATIENCE_S)
    told = f"announce(('127.0.0.1', {store.port}), 'run', 'here', 3)"
    return losses, start(
        f"from thinpipe.launch.net.ranks.supervisor import announce; {told}; {then}"
    )


def test_a_stop_ends_it_while_others_decide_whether_they_go_on() -> None:
    losses, supervisor = announced("os.kill(os.getpid(), 9)")
    until(lambda: losses.has(3))
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=PATIENCE_S / 4)
    assert supervisor.returncode == -signal.SIGTERM


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_others_go_on_without_is_killed_if_it_hangs(ends: bool) -> None:
    """Also if their run ends before."""
    losses, supervisor = announced("os.kill(os.getpid(), 19)")
    losses.report(3, "no sign of life")
    losses.settle(3, goes_on=True, out=True)
    if ends:
        losses.close()
    _, error = supervisor.communicate(timeout=PATIENCE_S)
    assert supervisor.returncode == OUT
    assert "rank 3 on here: had not ended 10 s after the others went on without it" in error
