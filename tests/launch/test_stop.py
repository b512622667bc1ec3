"""`thinpipe stop` asks the process that trains in a folder, and no other."""

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.runs import own_lock, trainer
from thinpipe.launch.cli import app
from thinpipe.launch.host import disk


def stop(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["stop", str(folder)])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("made", [False, True])
def test_where_nobody_trains_it_says_so(made: bool, tmp_path: Path) -> None:
    if made:
        own_lock(tmp_path, process=os.getpid())
    code, said = stop(tmp_path)
    assert code == 2
    assert "no run is training there; name the folder of one that is" in said


def test_only_the_process_that_trains_there_is_asked(tmp_path: Path) -> None:
    with trainer(tmp_path) as process:
        code, said = stop(tmp_path)
        assert (code, "process 1, which it names, is not its run's" in said) == (2, True), said
        own_lock(tmp_path, "elsewhere", process.pid)
        code, said = stop(tmp_path)
        assert (code, "its run trains on elsewhere; stop it there" in said) == (2, True), said
        (tmp_path / disk.RUN_LOCK).write_text("{", encoding="utf-8")
        assert "does not say which process trains there" in stop(tmp_path)[1]
        assert process.poll() is None
        own_lock(tmp_path, process=process.pid)
        code, said = stop(tmp_path)
        assert (code, "all ranks save after the same step" in said) == (0, True), said
        assert process.wait(60) == -signal.SIGUSR1
