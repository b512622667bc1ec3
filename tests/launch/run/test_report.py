"""A report that takes long keeps no other rank waiting."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import commands
from tests.launch.test_train import run_file
from tests.waiting import until
from thinpipe.launch.view.report import html
from thinpipe.launch.view.report.content import Story

__all__ = ["run_file"]


def _with_a_slow_report(*started: Any) -> None:
    write = html.write_report

    def slowly(story: Story) -> Path:
        if not story.timeline:  # of an evaluation, which others wait for
            return write(story)
        (story.info.folder / "slow").touch()
        other = {"name": "thinpipe 1", "ppid": os.getppid()}
        until(lambda: all(process.info != other for process in psutil.process_iter([*other])))
        return write(story)

    html.write_report = slowly
    commands._be(*started)


@pytest.mark.slow
@pytest.mark.dist
def test_a_finished_run_exits_with_0_however_long_its_report_takes(run_file: Path) -> None:
    settings = ("train.epochs=1", "pipeline.cuts=[2]")
    words = [word for setting in settings for word in ("--set", setting)]
    paths = [str(run_file.parent / name) for name in ("out", "err")]
    arguments = (["train", str(run_file), *words], paths, os.getcwd(), dict(os.environ))
    process = commands.CONTEXT.Process(target=_with_a_slow_report, args=arguments)
    process.start()
    process.join(commands.PATIENCE_S)
    assert process.exitcode == 0, Path(paths[1]).read_text(encoding="utf-8")
    assert (run_file.parent / "run" / "slow").exists()
    assert (run_file.parent / "run" / "report.html").exists()
