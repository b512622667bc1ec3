"""`thinpipe launch` with OpenSSH itself: connections that break, files, and whole runs."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.ports import free_port
from tests.programs import ran
from tests.shaped import shaped
from tests.sshd import OpenSsh, needs_sshd
from tests.waiting import until
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.lab.names import host_address
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.ssh.commands import Start, enter, ssh, ssh_commands
from thinpipe.launch.net.ssh.copying import copy_files, files_to_copy
from thinpipe.launch.net.ssh.hosts import HostsConfig, load_hosts
from thinpipe.launch.net.ssh.processes import run_commands
from thinpipe.launch.view.report.metrics import read_metrics

pytestmark = [pytest.mark.dist, needs_sshd]

PAGE = Path(__file__).parents[4] / "docs" / "own_code.md"
PROGRAM = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
HOST = """
[[host]]
name = "{name}"
checkout = "{checkout}"
python = "{python}"
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A server that ssh knows as `box`."""
    place = OpenSsh(tmp_path, {"box": ("127.0.0.1", free_port())})
    monkeypatch.setenv("PATH", os.pathsep.join([f"{tmp_path}/bin", os.environ["PATH"]]))
    with subprocess.Popen(place.server("box"), stderr=subprocess.DEVNULL) as process:
        place.wait("box")
        yield process
        process.terminate()


def one_host(tmp_path: Path) -> HostsConfig:
    (tmp_path / "checkout").mkdir(exist_ok=True)
    path = tmp_path / "hosts.toml"
    path.write_text(HOST.format(name="box", checkout=tmp_path / "checkout", python="python3"))
    return load_hosts(path)


def test_a_connection_that_is_lost_is_not_one_that_could_not_be_made(
    server: subprocess.Popen[bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = one_host(tmp_path)
    command = ssh(hosts.host[0], "echo hello; echo connected; echo works; exec sleep 60")

    shown = "box| hello\nbox| works\n"

    def cut() -> None:
        until(lambda: os.fstat(1).st_size >= len(shown))  # capfd's file
        for session in psutil.Process(server.pid).children():
            session.kill()

    with ThreadPoolExecutor(1) as pool:
        breaks = pool.submit(cut)
        assert run_commands(hosts, {"box": command}) == 255
        breaks.result()
    out, err = capfd.readouterr()
    assert out == shown
    assert re.search(r"box: the ssh connection to box was lost after [\d.]+ m?s; look wh", err)
    assert "address, user, port or keys" not in err


def test_files_arrive_as_they_are(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    hosts, here = one_host(tmp_path), tmp_path / "here"
    (here / "runs of mine").mkdir(parents=True)
    (here / "runs of mine/r.toml").write_text('extends = "../base.toml"\n[train]\nlr = 1e-3\n')
    (here / "base.toml").write_text("[train]\nepochs = 7\n")
    (here / "data").mkdir()
    (here / "data/a.bin").write_bytes(bytes(range(256)) * 4096)
    (here / "run.key").write_text("secret")
    (here / "run.key").chmod(0o600)
    with contextlib.chdir(here):
        start = Start("runs of mine/r.toml")
        copy_files(hosts, files_to_copy(start, [Path("data"), Path("run.key")]))
        with pytest.raises(ConfigError, match=r"gone.py: no such file"):
            files_to_copy(start, [Path("gone.py")])
    there = tmp_path / "checkout"
    for name in ("runs of mine/r.toml", "base.toml", "data/a.bin", "run.key"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    assert (there / "run.key").stat().st_mode & 0o777 == 0o600
    (there / "data").chmod(0o755)
    absolute = tmp_path / "elsewhere.toml"
    absolute.write_text("[train]\n")
    copy_files(hosts, [absolute])
    assert absolute.read_text(encoding="utf-8") == "[train]\n"
    broken = hosts.host[0].model_copy(update={"checkout": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"box: could not write .*install ThinPipe there, or"):
        copy_files(hosts.model_copy(update={"host": (broken,)}), [absolute])
    nobody = hosts.host[0].model_copy(update={"port": free_port()})
    with pytest.raises(ConfigError, match="could not connect to box; check that `ssh -p "):
        copy_files(hosts.model_copy(update={"host": (nobody,)}), [absolute])


def test_folders_are_entered_as_a_shell_does() -> None:
    assert enter("~/my runs").startswith("cd -- ~/'my runs' || ")


def test_restarts_are_passed_on(tmp_path: Path) -> None:
    commands = ssh_commands(one_host(tmp_path), Start("a b.py", arguments=["-x"], max_restarts=3))
    assert (
        "run --nnodes 1 --rdzv box:29500 --max-restarts 3 '\"'\"'a b.py'\"'\"' -- -x"
        in (commands["box"][-1])
    )


@pytest.mark.slow
def test_the_documented_program_on_two_hosts_with_unequal_shares(tmp_path: Path) -> None:
    """From a third: program, data and key are copied; the machines meet at an alias."""
    net = shaped(NetworkSpec.of(3, "100mbit", delay="1ms"))
    place = OpenSsh(tmp_path, {f"box{n}": (host_address(n), 2200) for n in range(2)})
    write_here(tmp_path)
    with net:
        for number in range(2):
            words = place.server(f"box{number}")
            net.start(number, lambda words=words: os.execv(words[0], words))

        def launch(_host: int) -> tuple[int, str]:
            os.chdir(tmp_path / "here")
            for name in [name for name in os.environ if "RANK" in name or "WORLD" in name]:
                del os.environ[name]
            os.environ["PATH"] = os.pathsep.join([f"{tmp_path}/bin", os.environ["PATH"]])
            for number in range(2):
                place.wait(f"box{number}")
            words = [sys.executable, "-P", "-m", "thinpipe.launch", "launch", "hosts.toml"]
            words += ["mine.py", "--copy", "--with", "train.pt", "--with", "eval.pt"]
            words += ["--with", "run.key"]
            done = ran(*words, code=None)
            return done.returncode, done.stdout + done.stderr

        ((code, output),) = net.run(launch, hosts=[2], timeout_s=280)
    assert code == 0, output
    assert "box0| step 12/12" in output
    first, second = tmp_path / "box0", tmp_path / "box1"
    losses = [record.loss for record in read_metrics(first / "runs/mine/metrics.jsonl")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert not (second / "mine.safetensors").exists()
    found: dict[str, object] = {}
    exec(PROGRAM.split("pipe = ")[0], found)
    whole = found["model"]()  # type: ignore[operator]
    whole.load_state_dict(load_file(first / "mine.safetensors"))
    ranks = {path.name for path in (second / "runs/mine/checkpoints").rglob("*rank*")}
    assert {name.split("rank-")[1].split(".")[0] for name in ranks} == {"3"}


def write_here(tmp_path: Path) -> None:
    """What the user has, and where ThinPipe is on the hosts."""
    here = tmp_path / "here"
    here.mkdir()
    for number in range(2):
        (tmp_path / f"box{number}").mkdir()
    (here / "mine.py").write_text(PROGRAM)
    torch.manual_seed(0)
    rows = torch.randint(600, (16, 1)) + torch.arange(9)
    torch.save((rows % 600).repeat(8, 1), here / "train.pt")
    torch.save(rows % 600, here / "eval.pt")
    keys.new(here / "run.key")
    environment = 'environment = { THINPIPE_KEY_FILE = "run.key", OMP_NUM_THREADS = "1" }\n'
    text = ""
    for number, ranks in ((0, 3), (1, 1)):
        name = f"box{number}"
        text += HOST.format(name=name, checkout=tmp_path / name, python=sys.executable)
        text += f"ranks = {ranks}\n{environment}"
    (here / "hosts.toml").write_text(text)
