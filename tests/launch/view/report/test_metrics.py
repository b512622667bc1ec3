import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.disk import full_disk
from tests.records import step_record, wire_totals
from thinpipe.launch.view.report.metrics import MetricsWriter, StepRecord, read_metrics

KEYS = [
    "step", "epoch", "loss", "tokens_per_s", "step_s", "bubble", "wire", "tokens", "grad_norm",
    "lr", "skipped", "sync_bytes", "control_bytes", "eval", "repaired", "notes",
    "own", "weight_bytes", "gradient_bytes", "samples",
]  # fmt: skip
MEASURED = [
    "error", "change", "cosine", "channel_error", "channel_change", "worst_error", "worst_channel",
    "largest_channel", "largest_share", "massive_tokens", "gain", "dimensions",
]  # fmt: skip


def _record(step: int) -> StepRecord:
    (there, back) = wire_totals([6], nbytes=500)
    return step_record(
        step,
        wire=(replace(there, nbytes=1000 + step), back),
        eval={"loss": 2.1, "loss_compressed": 2.11} if step % 2 == 0 else None,
        repaired={6: 2} if step == 3 else {},
    )


def _write(path: Path, steps: range) -> list[StepRecord]:
    records = [_record(step) for step in steps]
    with MetricsWriter(path, None) as writer:
        for record in records:
            writer.write(record)
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_what_is_written_is_read_back(path: Path) -> None:
    assert _write(path, range(1, 5)) == read_metrics(path)


def test_a_line_holds_plain_json_under_the_documented_keys(path: Path) -> None:
    _write(path, range(1, 2))
    line = json.loads(path.read_text(encoding="utf-8"))
    assert list(line) == KEYS
    sent = {"cut": 6, "direction": "forward", "bytes": 1001, "messages": 4, "values": 2000}
    assert line["wire"][0] == {**sent, "known": 0, "first_visits": 0, **dict.fromkeys(MEASURED)}


def test_each_step_is_on_disk_before_the_next(path: Path) -> None:
    with MetricsWriter(path, None) as writer:
        for step in (1, 2, 3):
            writer.write(_record(step))
            assert len(read_metrics(path)) == step


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_and_read_as_nan(path: Path, loss: float) -> None:
    with MetricsWriter(path, None) as writer:
        writer.write(replace(_record(1), loss=loss, grad_norm=loss, skipped=True, eval={"x": loss}))
    line = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert line["loss"] is None
    (read,) = read_metrics(path)
    assert math.isnan(read.loss)
    assert read.grad_norm is None
    assert read.eval is not None
    assert math.isnan(read.eval["x"])


def test_resume_drops_later_steps_and_appends(path: Path) -> None:
    records = _write(path, range(1, 8))
    again = replace(_record(4), loss=99.0)
    with MetricsWriter(path, 3) as writer:
        writer.write(again)
    assert read_metrics(path) == [*records[:3], again]
    assert [item.name for item in path.parent.iterdir()] == ["metrics.jsonl"]


def test_resume_drops_a_torn_last_line(path: Path) -> None:
    records = _write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-25])
    assert read_metrics(path) == records[:2]
    with MetricsWriter(path, 3) as writer:
        writer.write(records[2])
    assert read_metrics(path) == records


def test_a_last_line_that_lacks_only_its_newline_counts(path: Path) -> None:
    records = _write(path, range(1, 3))
    path.write_bytes(path.read_bytes()[:-1])
    assert read_metrics(path) == records


def test_resume_without_a_file_begins_one(path: Path) -> None:
    with MetricsWriter(path, 5) as writer:
        writer.write(_record(6))
    assert [record.step for record in read_metrics(path)] == [6]


def test_a_new_run_does_not_mix_with_an_earlier_one(path: Path) -> None:
    records = _write(path, range(1, 3))
    with pytest.raises(ValueError, match=r"metrics\.jsonl already holds .* another folder"):
        MetricsWriter(path, None)
    assert read_metrics(path) == records


@pytest.mark.parametrize(
    ("bad", "what"), [('{"step": 2, "epo', "JSON"), ('{"step": 2}', "epoch"), ("", "JSON")]
)
def test_a_bad_line_in_the_middle_is_named(path: Path, bad: str, what: str) -> None:
    _write(path, range(1, 4))
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], bad, lines[2]]) + "\n")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:2: not a step record .*{what}"):
        read_metrics(path)


def test_steps_that_a_full_disk_has_no_room_for_are_written_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [_record(step) for step in range(1, 40)]
    with MetricsWriter(path, None) as writer:
        with full_disk():
            for record in records[:-1]:
                writer.write(record)
        assert path.stat().st_size == 4096  # the last line is there in part
        writer.write(records[-1])
    assert read_metrics(path) == records
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: steps wait to be written: File too large: `ulimit -f` allows "
        "4,096 bytes; raise it (`ulimit -f unlimited`)"
    ]
