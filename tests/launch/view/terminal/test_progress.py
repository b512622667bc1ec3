import math

from tests.records import step_record
from thinpipe.launch.view.terminal.progress import LOSS_STEPS, RunningValues, Sparkline


def test_sparkline_falls_from_high_to_low_and_never_outgrows_its_cells() -> None:
    line = Sparkline(8)
    assert str(line) == ""
    for value in range(1000, 0, -1):
        line.add(float(value))
        line.add(math.nan)
        assert len(str(line)) <= 8
    text = str(line)
    assert (text[0], text[-1]) == ("█", "▁")
    assert list(text) == sorted(text, reverse=True)


def test_the_mean_forgets_older_losses_and_leaves_out_what_is_not_finite() -> None:
    values = RunningValues()
    values.update(step_record(1, loss=math.nan))
    assert math.isnan(values.mean_loss)
    for step, loss in enumerate([9.0, *[1.0] * (LOSS_STEPS - 1), math.inf], 2):
        values.update(step_record(step, loss=loss))
    assert values.mean_loss == (9 + LOSS_STEPS - 1) / LOSS_STEPS
    values.update(step_record(99, loss=1.0))
    assert values.mean_loss == 1.0
