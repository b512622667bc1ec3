"""`thinpipe stop` asks the process that trains in a folder, and no other."""

import os
import signal
from pathlib import Path

import pytest

from tests.invoking import said
from tests.runs import own_lock, trainer
from thinpipe.launch.host import disk


@pytest.mark.parametrize("made", [False, True])
def test_where_nobody_trains_it_says_so(made: bool, tmp_path: Path) -> None:
    if made:
        own_lock(tmp_path, process=os.getpid())
    problem = "no run is training there; name the folder of one that is"
    assert problem in said("stop", tmp_path, code=2)


def test_only_the_process_that_trains_there_is_asked(tmp_path: Path) -> None:
    with trainer(tmp_path) as process:
        problem = "process 1, which it names, is not its run's"
        assert problem in said("stop", tmp_path, code=2)
        own_lock(tmp_path, "elsewhere", process.pid)
        problem = "its run trains on elsewhere; stop it there"
        assert problem in said("stop", tmp_path, code=2)
        (tmp_path / disk.RUN_LOCK).write_text("{", encoding="utf-8")
        assert "does not say which process trains there" in said("stop", tmp_path, code=2)
        assert process.poll() is None
        own_lock(tmp_path, process=process.pid)
        assert "all ranks save after the same step" in said("stop", tmp_path)
        assert process.wait(60) == -signal.SIGUSR1
