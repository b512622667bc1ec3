"""Which evaluation was the best, and when there were enough."""

import math

import pytest
from pydantic import ValidationError

from thinpipe.launch.best import Best
from thinpipe.launch.config.sections import EvalConfig
from thinpipe.launch.config.toml import ConfigError


def judged(best: Best, name: str, *values: float) -> list[bool]:
    return [best.judge({"loss": 1.0, name: value}, step) for step, value in enumerate(values, 1)]


def test_less_loss_is_better_and_more_accuracy() -> None:
    assert judged(Best(EvalConfig(best="loss")), "loss", 3, 2, 2, 2.5) == [True, True, False, False]
    accuracy = Best(EvalConfig(best="accuracy"))
    assert judged(accuracy, "accuracy", 0.5, 0.4, 0.6) == [True, False, True]
    assert (accuracy.step, accuracy.value) == (3, 0.6)
    assert judged(Best(EvalConfig(best="min within")), "within", 3, 2) == [True, True]


def test_an_evaluation_of_nothing_is_never_the_best() -> None:
    best = Best(EvalConfig(best="loss", patience=2))
    assert judged(best, "loss", math.nan, 5.0, math.nan) == [False, True, False]
    assert not best.enough


def test_enough_are_so_many_in_a_row_and_counting_goes_on_after_a_resume() -> None:
    best = Best(EvalConfig(patience=3))
    judged(best, "loss", 2, 3, 1, 3, 3)
    assert not best.enough
    again = Best(EvalConfig(patience=3))
    again.load_state_dict(best.state_dict())
    assert not again.judge({"loss": 1.5}, 6)
    assert again.enough
    assert again.words() == "the best loss is 1, after step 3"
    other = Best(EvalConfig(best="accuracy", patience=3))
    other.load_state_dict(best.state_dict())
    assert other.step is None, "another metric is counted from the beginning"


def test_without_settings_nothing_is_counted() -> None:
    best = Best(EvalConfig())
    assert judged(best, "loss", 1, 2, 3) == [False] * 3
    assert not best.enough


def test_what_cannot_be_told_is_rejected() -> None:
    with pytest.raises(ConfigError, match='is more of it better, or less\\? write "max within"'):
        Best(EvalConfig(best="within"))
    with pytest.raises(ConfigError, match="evaluations measure loss; name one of them, or add it"):
        Best(EvalConfig(best="f1")).judge({"loss": 1.0}, 1)
    with pytest.raises(ValidationError, match=r'metrics = "acuracy".*did you mean "accuracy"'):
        EvalConfig(metrics=("acuracy",))
