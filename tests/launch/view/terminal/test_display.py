import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.records import run_info, step_record, wire_totals
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import summarize
from thinpipe.launch.view.terminal.display import Display
from thinpipe.launch.view.terminal.final import Left, what_is_left


def _info(cuts: tuple[int, ...] = (6,), name: str = "tiny", replicas: int = 1) -> RunInfo:
    return run_info(cuts, name=name, replicas=replicas)


def _record(
    step: int, cuts: Sequence[int] = (6,), *, loss: float = 2.5, evaluated: bool = False
) -> StepRecord:
    return step_record(
        step,
        epoch=12,
        loss=loss,
        tokens_per_s=123_456.7,
        step_s=4.0,
        bubble=0.256,
        wire=wire_totals(cuts, nbytes=500_000_000, messages=16, values=10**9, channel_error=0.0421),
        grad_norm=None if math.isnan(loss) else 1.25,
        skipped=math.isnan(loss),
        sync_bytes=123_000_000,
        eval={"loss": 2.1234, "loss_compressed": 2.1299} if evaluated else None,
        repaired={cuts[0]: 3} if cuts and evaluated else {},
    )


def _show(info: RunInfo, records: list[StepRecord], *, interactive: bool, finish: bool) -> str:
    """Run a display at 80 columns and return its text; cursor movements become line ends."""
    file = io.StringIO()
    console = Console(file=file, width=80, height=60, force_terminal=interactive)
    with Display(info, interactive=interactive, console=console) as display:
        for record in records:
            display.step(record)
        if finish:
            display.finish(summarize(info, records), LEFT)
    without_colour = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", without_colour)


@pytest.mark.parametrize("cuts", [(), (6, 12, 18, 24, 30, 36, 120)])
@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("interactive", [False, True])
def test_everything_fits_80_columns(cuts: tuple[int, ...], finish: bool, interactive: bool) -> None:
    info = _info(cuts, name="gpt2-xl-over-200-mbit", replicas=8)
    records = [
        _record(1, cuts),
        _record(2, cuts, loss=math.nan),
        _record(9_999, cuts, evaluated=True),
    ]
    text = _show(info, records, interactive=interactive, finish=finish)
    assert [line for line in text.splitlines() if cell_len(line) > 80] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_panel_shows_rate_and_ratios_of_each_cut_and_direction() -> None:
    text = _show(_info(), [_record(1), _record(2, evaluated=True)], interactive=True, finish=False)
    assert "step 2/10000" in text
    rows = [line.strip("│ ").split() for line in text.splitlines()]
    way = ["500", "MB", "1,000.0", "4.0\N{MULTIPLICATION SIGN}", "4.2", "%"]
    assert ["6", *way, *way] in rows
    assert ["all", *way[:3], *way[:3]] in rows
    assert "forward aqsgd 4-bit; backward hadamard 4-bit" in text
    for shown in ("2.5000", "2.1234", "2.1299", "123,457", "25.6 %", "1.25", "3.00e-04", "123 MB"):
        assert shown in text


@pytest.mark.parametrize("interactive", [False, True])
def test_trained_parameters_are_shown_if_some_are_frozen(interactive: bool) -> None:
    lora = replace(_info(replicas=8), exchanged=2_400_000)
    text = _show(lora, [_record(1)], interactive=interactive, finish=False)
    assert "1.30 G parameters (2.40 M trained), 2 stages" in text
    assert [line for line in text.splitlines() if cell_len(line) > 80] == []
    assert "trained" not in _show(_info(), [_record(1)], interactive=interactive, finish=False)


def test_panel_keeps_the_last_evaluation_and_counts_skipped_steps() -> None:
    records = [_record(1, evaluated=True), _record(2, loss=math.nan), _record(3, loss=math.nan)]
    text = _show(_info(), records, interactive=True, finish=False)
    assert "2.1234" in text
    assert "skipped 2 " in text


def test_the_loss_of_a_step_is_its_own_and_the_mean_is_of_the_last_ten() -> None:
    records = [_record(step, loss=9.0 if step <= 90 else 2.0) for step in range(1, 99)]
    records.append(_record(99, loss=1.0, evaluated=True))
    log = _show(_info(), records, interactive=False, finish=True)
    (line,) = (line for line in log.splitlines() if "   99/10000" in line)
    assert "epoch 12  loss 1.0000" in line
    assert "Training loss, last epoch" in log
    panel = _show(_info(), records, interactive=True, finish=False).splitlines()
    last = [line for line in panel if "mean of 10" in line][-1]
    assert last.strip("│ ").split()[:6] == ["loss", "1.0000", "mean", "of", "10", "2.6000"]


LEFT = Left(25_000_000, 20_000_000, 1)


def test_a_run_ends_with_what_it_achieved_and_left() -> None:
    """In words, as the last lines."""
    records = [_record(step, evaluated=step == 3) for step in (1, 2, 3)]
    text = " ".join(_show(_info(), records, interactive=False, finish=True).split())
    assert "loss 2.50 at the start, 2.12 on held-out samples now" in text
    assert "perplexity 12.2, now 8.36" in text
    times = "\N{MULTIPLICATION SIGN}"
    assert f"3.00 GB between stages; bf16 4.0{times} as much, fp32 8.0{times}" in text
    assert (
        "at 100 Mbit/s the busiest link would take 2 min 00 s for its part, in fp32 16 min" in text
    )
    assert "25.0 MB in the run's folder, 20.0 MB of it in 1 checkpoint" in text


def test_what_is_left_is_counted(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-5").mkdir(parents=True)
    (tmp_path / "checkpoints/step-5/part").write_bytes(bytes(700))
    (tmp_path / "report.html").write_bytes(bytes(300))
    assert what_is_left(tmp_path) == Left(1000, 700, 1)


def test_final_tables_show_bytes_really_sent_and_totals() -> None:
    records = [_record(step) for step in (1, 2, 3)]
    text = _show(_info(), records, interactive=False, finish=True)
    times = "\N{MULTIPLICATION SIGN}"
    forward = next(line for line in text.splitlines() if "forward" in line)
    amounts = ["48", "1.50", "GB", "6.00", "GB", f"4.0{times}", "12.0", "GB", f"8.0{times}"]
    assert forward.split() == ["6", "forward", "aqsgd", "4-bit", *amounts]
    totals = ["all", "96", "3.00", "GB", "12.0", "GB", f"4.0{times}", "24.0", "GB", f"8.0{times}"]
    assert totals in [line.split() for line in text.splitlines()]
    assert "369 MB" in text
    assert str(Path("runs") / "tiny" / "report.html") in text


def test_log_has_no_control_characters_even_where_colour_is_forced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    info, records = _info(), [_record(1), _record(2, evaluated=True)]
    with Display(info, interactive=False) as display:
        for record in records:
            display.step(record)
        display.note("checkpoint [saved] to runs/tiny/step-2")
        display.finish(summarize(info, records), LEFT)
    text = capsys.readouterr().out
    assert "checkpoint [saved] to runs/tiny/step-2\n" in text
    assert [char for char in text if ord(char) < 32 and char != "\n"] == []


def test_a_report_that_is_on_another_machine_is_not_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    info, records = _info(), [_record(1)]
    for written in (True, False):
        with Display(info, interactive=False) as display:
            display.finish(summarize(info, records), LEFT if written else None)
        assert ("report.html" in capsys.readouterr().out) is written


def test_log_prints_first_last_and_evaluated_steps_only() -> None:
    records = [_record(step, evaluated=step == 50) for step in (*range(1, 100), 10_000)]
    lines = _show(_info(), records, interactive=False, finish=False).splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step")]
    assert steps == ["1/10000", "50/10000", "10000/10000"]
    assert "  evaluation: loss 2.1234, with compressed boundaries 2.1299" in lines
    assert "cached activations of the two ends differed and were reset: 3 samples at cut 6" in lines
