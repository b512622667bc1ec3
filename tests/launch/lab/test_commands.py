import os
import signal

import pytest

from thinpipe.launch.lab import commands
from thinpipe.launch.lab.commands import run_command
from thinpipe.launch.lab.network import ShapedNetwork

Capture = pytest.CaptureFixture[str]


def test_hosts_share_the_cores_of_this_machine(
    net: ShapedNetwork, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ["sh", "-c", "echo $OMP_NUM_THREADS"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(commands, "usable_cores", lambda: 9)
    assert run_command(net, show) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run_command(net, show) == 0
    hosts = range(3)
    expected = [f"host{host}| {threads}" for threads in (3, 5) for host in hosts]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(expected)


def test_every_host_runs_the_command_as_itself(net: ShapedNetwork, capfd: Capture) -> None:
    script = "echo {rank} {addr} $RANK $SHAPED_MASTER; hostname >&2"
    assert run_command(net, ["sh", "-c", script]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "host0| 0 10.77.0.1 0 10.77.0.1",
        "host1| 1 10.77.0.2 1 10.77.0.1",
        "host2| 2 10.77.0.3 2 10.77.0.1",
    ]
    assert sorted(err.splitlines()) == ["host0| host0", "host1| host1", "host2| host2"]


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", 137)])  # as of a shell
def test_the_code_of_the_host_that_fails_is_returned_and_the_others_end(
    net: ShapedNetwork, capfd: Capture, end: str, code: int
) -> None:
    assert run_command(net, ["sh", "-c", f"test {{rank}} != 1 || {end}; exec sleep 60"]) == code
    assert f"host1 exited with code {code}; the others were stopped" in capfd.readouterr().err


def test_a_host_that_others_go_on_without_ends_nobody(net: ShapedNetwork, capfd: Capture) -> None:
    command = "test {rank} != 1 || exit 75; sleep 1; echo still here"
    assert run_command(net, ["sh", "-c", command]) == 75
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == ["host0| still here", "host2| still here"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_a_host_is_forked_ends_its_command_alone(
    net: ShapedNetwork, monkeypatch: pytest.MonkeyPatch, capfd: Capture, signum: signal.Signals
) -> None:
    """What is forked has the handlers of its parent, which are not for it."""
    if signal.getsignal(signum) == signal.SIG_IGN:
        pytest.skip("what is ignored stays so, as under nohup")
    fork, test = os.fork, os.getpid()

    def signalled() -> int:
        first, pid = os.getpid() == test, fork()
        if pid == 0 and first == (signum != signal.SIGINT):  # a proxy has none of Ctrl-C
            try:
                os.kill(os.getpid(), signum)
            except BaseException:
                os._exit(99)
        return pid

    monkeypatch.setattr(os, "fork", signalled)
    assert run_command(net, ["sleep", "600"]) == 128 + signum
    assert "cannot enter" not in capfd.readouterr().err


def test_a_signal_after_a_command_has_ended_changes_nothing(
    net: ShapedNetwork, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """Its process id may be another's by then."""
    waitpid, test = os.waitpid, os.getpid()

    def signalled(pid: int, options: int) -> tuple[int, int]:
        ended = waitpid(pid, options)
        if os.getpid() != test:
            os.kill(os.getpid(), signal.SIGTERM)
        return ended

    monkeypatch.setattr(os, "waitpid", signalled)
    assert run_command(net, ["sh", "-c", "exit 3"]) == 3
    assert "cannot enter" not in capfd.readouterr().err


def test_a_missing_command_is_named(net: ShapedNetwork, capfd: Capture) -> None:
    assert run_command(net, ["no-such-program"]) == 127
    assert "| no-such-program: No such file" in capfd.readouterr().err


def test_only_the_output_of_the_shown_host_is_printed(net: ShapedNetwork, capfd: Capture) -> None:
    assert run_command(net, ["echo", "{host}"], show=1) == 0
    assert capfd.readouterr() == ("host1\n", "")


def test_the_last_lines_of_a_failed_hidden_host_are_shown(
    net: ShapedNetwork, capfd: Capture
) -> None:
    script = "test {rank} = 0 && exec sleep 60; echo the last line >&2; exit 3"
    assert run_command(net, ["sh", "-c", script], show=0) == 3
    assert "| the last line" in capfd.readouterr().err


def test_long_output_and_an_unfinished_line_are_complete(
    net: ShapedNetwork, capfd: Capture
) -> None:
    assert run_command(net, ["sh", "-c", "seq 20000; printf end"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3 * 20001
    mine = [line for line in lines if line.startswith("host2| ")]
    assert mine == [f"host2| {said}" for said in (*range(1, 20001), "end")]


def test_processes_left_running_by_a_command_are_not_waited_for(net: ShapedNetwork) -> None:
    assert run_command(net, ["sh", "-c", "sleep 60 & exit 0"]) == 0
    assert run_command(net, ["sh", "-c", "test {rank} != 0 || yes & exit 0"]) == 0


def test_a_host_that_does_not_exist_cannot_be_shown(net: ShapedNetwork) -> None:
    with pytest.raises(ValueError, match="--show = 3: use a host from 0 to 2"):
        run_command(net, ["true"], show=3)
