"""The commands of docs/machines.md, as they stand there, on three emulated hosts."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.test_train import RUN
from tests.shaped import shaped
from tests.texts import write_run
from thinpipe.launch.lab.commands import run_command
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
PROGRAMS = {
    "thinpipe": [sys.executable, "-P", "-m", "thinpipe.launch"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def command(start: str) -> list[str]:
    """The documented command that starts so; programs are those of this interpreter."""
    joined = TEXT.replace("\\\n", " ")
    found = re.search(rf"^{re.escape(start)}.*$", joined, re.MULTILINE)
    assert found is not None, start
    program, *arguments = shlex.split(found[0])
    return [*PROGRAMS[program], *arguments]


@pytest.fixture(scope="module")
def net() -> Iterator[ShapedNetwork]:
    with shaped(NetworkSpec.of(3, "50mbit", delay="2ms")) as network:
        yield network


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with run.toml, three stages."""
    write_run(tmp_path, RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "run"


def as_users_start_it(words: list[str]) -> list[str]:
    """Without the place in the run that emulated hosts find in their environment."""
    unset = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    return ["env", *(part for name in unset for part in ("-u", name)), *words]


def check(net: ShapedNetwork, run_folder: Path, start: str) -> None:
    words = command(start)  # `thinpipe train --rdzv` knows better than that environment
    words = as_users_start_it(words) if start.startswith("torchrun") else words
    assert run_command(net, words) == 0
    summary = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["stages"], summary["steps"]) == (3, 15)


def test_thinpipe_on_three_hosts(net: ShapedNetwork, run_folder: Path) -> None:
    check(net, run_folder, "thinpipe train run.toml --nnodes 3")


def test_torchrun_on_three_hosts(net: ShapedNetwork, run_folder: Path) -> None:
    assert "export GLOO_SOCKET_IFNAME=eth0" in TEXT  # as emulated hosts have it
    check(net, run_folder, "torchrun --nnodes 3")
