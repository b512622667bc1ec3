"""A run that does not learn any more says so, and does not end as if it had."""

import logging
from pathlib import Path

import pytest

from tests.launch.test_train import run_file, thinpipe
from tests.training import config
from thinpipe.launch.run.skips import SkippedError, Skips

__all__ = ["run_file"]


def skips(limit: int = 3) -> Skips:
    train = {"max_skipped": limit, "lr": 0.5}
    return Skips(config(train=train, pipeline={"precision": "bf16"}), speaks=True)


def test_the_first_skipped_step_warns_and_some_in_a_row_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = skips()
    with caplog.at_level(logging.WARNING):
        for step, skipped in enumerate((0, 1, 1, 0, 1, 1), start=1):
            counted.count(step, skipped=bool(skipped))
    assert [record.getMessage()[:26] for record in caplog.records] == ["warning: step 2 was skippe"]
    counted.finish(6)  # two at the end of six
    with pytest.raises(SkippedError, match=r"steps 5 to 7 were skipped.*lower train.lr than 0\.5"):
        counted.count(7, skipped=True)


def test_steps_of_which_no_target_counts_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    counted = skips()
    with caplog.at_level(logging.WARNING):
        counted.count(1, skipped=True)
        counted.count(2, skipped=True, empty=True)
        counted.count(3, skipped=False)
        counted.count(4, skipped=True, empty=True)
        counted.count(5, skipped=True, empty=True)
    first, second = (record.getMessage() for record in caplog.records)
    assert "its loss or gradients are not finite" in first
    assert "step 2 was skipped: none of their targets counts in the loss" in second
    with pytest.raises(SkippedError, match=r"steps 4 to 6 were skipped: none of their targets"):
        counted.count(6, skipped=True, empty=True)


def test_a_short_run_that_learned_nothing_is_told_at_its_end() -> None:
    counted = skips(limit=10)
    counted.count(1, skipped=False)
    counted.count(2, skipped=True)
    counted.finish(2)  # one step may be an accident
    counted.count(3, skipped=True)
    with pytest.raises(SkippedError, match="steps 2 to 3 were skipped"):
        counted.finish(3)


@pytest.mark.dist
def test_an_absurd_learning_rate_does_not_exit_as_a_success(run_file: Path) -> None:
    done = thinpipe(run_file, "--set", "train.lr=1e30", "--set", "pipeline.cuts=[2]", code=2)
    assert "warning: step " in done.stderr
    assert "were skipped: their losses or gradients are not finite" in done.stderr
    assert "use a lower train.lr than 1e+30" in done.stderr
