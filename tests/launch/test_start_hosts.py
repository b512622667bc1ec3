"""A run on several machines from one command; a stand-in for ssh runs the commands here."""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.commands import PATIENCE_S
from tests.invoking import printed
from tests.launch.test_train import run_file, wait_until
from tests.ports import free_port
from thinpipe.launch.net.ssh.commands import Start, ssh_commands
from thinpipe.launch.net.ssh.hosts import load_hosts
from thinpipe.launch.net.ssh.processes import run_commands

__all__ = ["run_file"]

ROOT = Path(__file__).parents[2]
MARK = "THINPIPE_TEST_HOST"

SSH = """#!/bin/sh
# Like sshd, runs the command apart from the client; only its streams connect the two.
for word; do [ "$word" = -p ] && exec {ssh} "$@"; done
if [ "$1" = -G ]; then echo "hostname $(echo "$2" | sed s/^alias$/127.0.0.1/)"; exit; fi
while :; do case $1 in -T) shift;; -o) shift 2;; *) break;; esac; done
shift
cd {folder}/home && exec setsid --wait sh -c "$*"
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hosts, `thinpipe` in the user's home on each; processes there bear a mark."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thinpipe").symlink_to(ROOT)
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.format(ssh=shutil.which("ssh") or "ssh", folder=tmp_path))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(ssh.parent), os.environ["PATH"]]))
    path = tmp_path / "hosts.toml"
    path.write_text(f'rdzv = "127.0.0.1:{free_port()}"\n' + host(tmp_path, 0) + host(tmp_path, 1))
    return path


def host(tmp_path: Path, number: int) -> str:
    return f"""
[[host]]
name = "host{number}"
user = "me"
checkout = "thinpipe"
python = "{sys.executable}"
environment = {{ {MARK} = "{tmp_path}", OMP_NUM_THREADS = "1" }}
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "thinpipe.launch", "launch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def remains(tmp_path: Path) -> list[int]:
    """Processes of the hosts that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={tmp_path}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_hosts_end_with_the_command(
    hosts: Path, run_file: Path, signum: signal.Signals, expected: int
) -> None:
    metrics = run_file.parent / "run" / "metrics.jsonl"
    settings = ["--set", "pipeline.cuts=[2]", "--set", "train.epochs=100000"]
    with start(hosts, run_file, *settings) as process:
        try:
            wait_until(lambda: process.poll() is not None or metrics.exists(), PATIENCE_S)
            assert len(remains(hosts.parent)) >= 4  # an agent and a rank on each
            process.send_signal(signum)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == expected, out + err
    if signum == signal.SIGINT:
        assert "asked to stop: host0, host1 save and end" in err
        assert err.count("is saved; continue from there") == 1
    wait_until(lambda: not remains(hosts.parent), PATIENCE_S)


def run_here(hosts: Path, run_file: Path) -> int:
    found = load_hosts(hosts)
    start = Start(str(run_file), ["--set", "pipeline.cuts=[2]"])
    return run_commands(found, ssh_commands(found, start))


@pytest.mark.dist
def test_a_host_that_fails_ends_the_others(
    hosts: Path, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, _, after = hosts.read_text(encoding="utf-8").rpartition('"thinpipe"')
    hosts.write_text(f'{before}"elsewhere"{after}')
    assert run_here(hosts, run_file) == 2
    err = capfd.readouterr().err
    assert "host1| install ThinPipe there, or correct checkout" in err
    assert "error: host1 ended with exit code 2; the others were ended" in err
    wait_until(lambda: not remains(hosts.parent), PATIENCE_S)  # host0 would have waited for minutes


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_a_host_that_cannot_be_reached_is_named(
    hosts: Path, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    hosts.write_text(hosts.read_text(encoding="utf-8") + f'address = "127.0.0.1"\nport = {port}\n')
    assert run_here(hosts, run_file) == 255
    err = capfd.readouterr().err
    assert f"host1| ssh: connect to host 127.0.0.1 port {port}: Connection refused" in err
    assert f"check that `ssh -p {port} me@127.0.0.1 true` works without a prompt" in err
    wait_until(lambda: not remains(hosts.parent), PATIENCE_S)


def test_a_missing_python_is_named(
    hosts: Path, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts.write_text(hosts.read_text(encoding="utf-8").replace(sys.executable, "no/python"))
    assert run_here(hosts, run_file) == 127
    err = capfd.readouterr().err
    named = "host[01]: python = 'no/python': not found in thinpipe; install ThinPipe"
    assert re.search(named, err), "the one that ended first"


def test_without_ssh_nothing_starts(
    hosts: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(hosts.parent / "home"))
    with pytest.raises(ValueError, match="ssh: not on this machine; install OpenSSH's client"):
        run_here(hosts, run_file)


ODD = """
[[host]]
name = "a"
address = "10.0.0.1"
port = 2222
checkout = "~/my checkout"
python = "~/my tools/tell"
interface = "wg0"
environment = { ODD = "it's $HOME; & \\"so\\"" }
[[host]]
name = "b"
checkout = "/srv/b"
"""
TELL = """#!/bin/sh
pwd
printf '%s|' "$GLOO_SOCKET_IFNAME" "$ODD" "$@"
"""


RECORD = """#!/bin/sh
printf '%s\\0' "$@" >> "$RECORDED"
"""


dry_run = partial(printed, "launch", "--dry-run")


def as_pasted(text: str, tmp_path: Path) -> list[list[str]]:
    """What a shell gives to ssh for every command in a text."""
    (tmp_path / "ssh").write_text(RECORD)
    (tmp_path / "ssh").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    recorded = tmp_path / "recorded"
    environment = {**os.environ, "PATH": path, "RECORDED": str(recorded)}
    subprocess.run(["sh"], input=text, text=True, env=environment, check=True)
    commands = recorded.read_text(encoding="utf-8").split("-T\0")[1:]
    return [["-T", *command.split("\0")[:-1]] for command in commands]


def test_a_dry_run_prints_commands_that_survive_both_shells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(ODD)
    out = dry_run(path, "runs of/r.toml", "--resume", "--set", "a.b='c d'")
    notes = capfd.readouterr().err
    assert "runs of/r.toml is not on this machine, so the settings" in notes
    assert "every machine reads its own copy of runs of/r.toml: --copy sends" in notes
    assert "note: for a, b: network.key_file is not set" in notes
    first, second = as_pasted(out, tmp_path)
    assert first[:3] == ["-T", "-o", "BatchMode=yes"]
    assert first[-4:-1] == ["-p", "2222", "10.0.0.1"]
    assert second[-2] == "b"
    assert "--show -1" in second[-1]
    for name, content in (("my checkout", None), ("my tools", TELL)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "tell").write_text(content)
            (tmp_path / name / "tell").chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", first[-1]], env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    connected, place, given = output.splitlines()
    assert connected == "connected"
    assert place == str(tmp_path / "my checkout")
    expected = ["wg0", 'it\'s $HOME; & "so"', "-P", "-m", "thinpipe.launch", "train"]
    expected += ["runs of/r.toml", "--set", "a.b='c d'", "--resume"]
    expected += ["--nnodes", "2", "--rdzv", "10.0.0.1:29500"]
    assert given.split("|") == [*expected, ""]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "train.lr=-1"], "--set train.lr=-1: train.lr = -1: use a number greater than 0"),
        (
            [],
            "2 machines cannot share 3 ranks (stages x replicas) evenly; "
            "with 3 ranks a hosts file lists 1 or 3 machines, or gives each its `ranks`",
        ),
        (["--set", "pipeline.cuts=[2]", "--show", "c"], "'c': no such machine; use one of a, b"),
        (["--set", "pipeline.cuts=[2]"], ""),
    ],
)
def test_a_dry_run_checks_what_the_machines_would(
    tmp_path: Path, run_file: Path, more: list[str], message: str
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(ODD)
    assert message in dry_run(path, run_file, *more, code=2 if message else 0)


def test_lines_of_a_dry_run_are_short(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(GOOD)
    out = dry_run(path, "run.toml", "--show", "a")
    assert max(map(len, out.splitlines())) <= 140
    assert "--show -1" not in out


GOOD = '[[host]]\nname = "a"\ncheckout = "x"\n'
