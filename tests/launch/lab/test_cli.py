"""The command as users run it, mostly in a process of its own."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from tests.invoking import said
from tests.programs import ran
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("namespaces")

ROOT = Path(__file__).parents[3]
SHAPED = (  # as launch/cli.py adds it, without the seconds that importing torch takes
    "import typer; from thinpipe.launch.lab.cli import shaped; app = typer.Typer();"
    "app.command(context_settings={'allow_interspersed_args': False})(shaped); app()"
)


@contextmanager
def started(
    *arguments: str, output: int | BinaryIO = subprocess.DEVNULL
) -> Iterator["subprocess.Popen[bytes]"]:
    """The command in a process group of its own, killed at the end."""
    command = [sys.executable, "-c", SHAPED, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes(word: str) -> list[int]:
    """Those with an argument `word`."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if word in (process.info["cmdline"] or [])]


def all_of(terminal: int) -> bytes:
    """What was written to a terminal that is closed on the other side; closes it."""
    with open(terminal, "rb", buffering=0) as source:
        parts = []
        with suppress(OSError):  # Linux reports the end like this
            while part := source.read(4096):
                parts.append(part)
    return b"".join(parts)


@pytest.mark.slow
def test_only_the_shown_host_is_connected_to_the_terminal() -> None:
    terminal, theirs = pty.openpty()
    script = "test {rank} = 1 || { test -t 1 && exit 5; }; echo quiet; sleep 600"
    command = [sys.executable, "-c", SHAPED, "--hosts", "2", "--show", "0"]
    with subprocess.Popen(
        [*command, "--", "sh", "-c", script], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        assert process.wait(PATIENCE_S) == 5
    os.close(theirs)
    text = all_of(terminal)
    assert b"host0 exited with code 5" in text
    assert b"quiet" not in text


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_it_is_stopped(signum: signal.Signals) -> None:
    mark = str(time.monotonic_ns())
    script = ("sh", "-c", "sleep 600; true", mark)
    with started("--hosts", "2", "--delay", "1ms", "--", *script) as process:
        until(lambda: len(processes(mark)) == 5)  # this, two scripts and their proxies
        until(lambda: len(networks_of(processes(mark))) == 2)  # none of them is about to fork
        networks = networks_of(processes(mark))
        process.send_signal(signum)
        assert process.wait(PATIENCE_S) == (-9 if signum == signal.SIGKILL else 128 + signum)
        until(lambda: not processes(mark) and not processes(str(process.pid)))
    assert not networks & networks_of(psutil.pids())


def networks_of(pids: Iterable[int]) -> set[str]:
    """Those of the emulated hosts on which these processes run."""
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, PermissionError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


@pytest.mark.slow
def test_ctrl_c_gives_commands_time_to_save(tmp_path: Path) -> None:
    """A second signal before they have would end them at once."""
    note, output = tmp_path / "note", tmp_path / "output"
    saves = f"sleep 5; echo {{rank}} >> {note}; exit 0"
    script = f"trap '{saves}' INT; trap 'exit 1' TERM; echo ready; sleep 600 & wait"
    with (
        output.open("wb") as out,
        started("--hosts", "2", "--", "sh", "-c", script, output=out) as process,
    ):
        until(lambda: output.read_text(encoding="utf-8").count("| ready") == 2)  # it monitors both
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(PATIENCE_S) == 130
    assert sorted(note.read_text(encoding="utf-8").split()) == ["0", "1"]


def test_rates_are_set_from_another_terminal(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with (
        output.open("wb") as out,
        started("--hosts", "2", "--rate", "100mbit", "--", "sleep", "600", output=out),
    ):
        until(lambda: output.read_text(encoding="utf-8").endswith("\n"))
        name = output.read_text(encoding="utf-8").split()[-1]
        change = ["--down", "5mbit", "--pair", "0,1=1mbit"]
        done = said("shaped", "set", "--run", name, *change)
        wrong = said("shaped", "set", "--run", name, "--rate", "fast", code=2)
    assert done == f"run {name}: up 100 Mbit/s; down 5 Mbit/s; 0->1 1 Mbit/s; 1->0 1 Mbit/s"
    assert "--rate = 'fast'" in wrong


@pytest.fixture
def packages() -> Iterator[str]:
    """A folder that any user's Python finds our packages through."""
    folder = Path(tempfile.mkdtemp())
    sites = [entry for entry in sys.path if "packages" in entry]
    (folder / "sitecustomize.py").write_text(f"import site\nlist(map(site.addsitedir, {sites}))\n")
    folder.chmod(0o755)
    yield os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_normal_user_may_probe_and_run(packages: str) -> None:
    prefix, python = _as_normal_user()
    network = ("--hosts", "2", "--rate", "20mbit", "--delay", "5ms", "--probe")
    script = ("sh", "-c", "cat /proc/self/uid_map; echo >/dev/stdout")
    words = [*prefix, python, "-c", SHAPED, *network, "--", *script]
    environment = {"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    done = ran(*words, code=None, cwd=Path("/"), **environment)
    if "--cap-add" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    for text in ("0 -> 1", "1 -> 0", "20 Mbit/s", "10 ms"):
        assert text in done.stderr
    uid = os.getuid() or 65534
    assert f"host0| 0 {uid} 1" in [" ".join(line.split()) for line in done.stdout.splitlines()]


def _as_normal_user() -> tuple[list[str], str]:
    """What to put before a command to drop root, and an interpreter that others may run."""
    if os.getuid() != 0:
        return [], sys.executable
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is needed to become a normal user")
    version = f"/usr/bin/python3.{sys.version_info.minor}"
    python = next((p for p in (sys.executable, version) if _open_to_all(p)), None)
    if python is None:
        pytest.skip(f"{sys.executable} is not open to other users")
    user = ["--reuid=65534", "--regid=65534", "--clear-groups"]
    return ["setpriv", *user, "--no-new-privs", "--bounding-set=-all"], python


def _open_to_all(path: str) -> bool:
    real = Path(path).resolve()
    return real.exists() and all(p.stat().st_mode & 0o001 for p in (real, *real.parents))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2"], "nothing to run"),
        (["--rate", "1mbit", "--", "true"], "--hosts is missing"),
        (["--hosts", "2", "--rate", "fast", "--", "true"], "--rate = 'fast'"),
        (["--hosts", "2", "--show", "2", "--", "true"], "--show = 2"),
        (["set"], "nothing to change"),
        (["set", "--run", "1", "--rate", "1mbit"], "--run = 1: no such run"),
    ],
)
def test_wrong_arguments_are_rejected(arguments: Sequence[str], message: str) -> None:
    assert message in said("shaped", *arguments, code=2)


@pytest.mark.slow
def test_torchrun_finds_its_peers_by_name(tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1000); dist.all_reduce(x)\n"
        "print('sum', x[0].item(), flush=True)\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--node-rank", "{rank}", "--master-addr", "host0", str(script)]
    network = ["--hosts", "2", "--rate", "100mbit", "--delay", "2ms"]
    done = ran(sys.executable, "-c", SHAPED, *network, "--", *torchrun, cwd=ROOT)
    assert sorted(done.stdout.split("\n"))[1:] == ["host0| sum 2.0", "host1| sum 2.0"]
