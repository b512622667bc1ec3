"""The tools themselves read back what they were given, over a resume too."""

import math
import re
import struct
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.commands import PATIENCE_S
from tests.disk import full_disk
from tests.launch.test_train import wait_until
from tests.records import step_record, wire_totals
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.packages import check_writers
from thinpipe.launch.view.report.metric_table import scalars
from thinpipe.launch.view.report.metrics import StepRecord
from thinpipe.launch.view.writers.writer import Destination, WriterThread, destination, open_writer


def record(step: int, **changes: Any) -> StepRecord:
    there, back = wire_totals([6], nbytes=500 + step, error=0.25, channel_error=0.125)
    values: dict[str, Any] = {
        "wire": (replace(there, nbytes=1000 + step), back),
        "skipped": step == 2,
        "eval": {"loss": 2.5, "loss_compressed": 2.75} if step % 2 == 0 else None,
        "own": {"mine": 4.0},
    }
    return step_record(step, **(values | changes))


def config(folder: Path, *tools: str) -> RunConfig:
    return RunConfig.model_validate({"run": {"folder": str(folder)}, "report": {"writers": tools}})


def place(folder: Path, done: int | None = None) -> Destination:
    folder.mkdir(exist_ok=True)
    return destination(folder, "run", "tests", {"run": {"seed": 0}}, done)


def write(tool: str, folder: Path, steps: range, done: int | None = None) -> None:
    writer = open_writer(tool, place(folder, done))
    for step in steps:
        writer.write(step, scalars(record(step)))
    writer.close()


def events(folder: Path) -> Any:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_all_numbers_of_a_step_are_there() -> None:
    found = scalars(record(2, weight_bytes=5, gradient_bytes=6))
    assert found["train/loss"] == 5.0
    assert found["train/skipped"] == 1.0
    assert found["speed/tokens_per_s"] == 512.5
    assert found["bytes/cut_6_forward"] == 1002
    assert found["bytes/cut_6_backward"] == 502
    assert found["bytes/replicas"] == 77
    assert found["error/cut_6_forward"] == 0.25
    assert found["channel_error/cut_6_forward"] == 0.125
    assert "largest_share/cut_6_forward" not in found
    assert found["eval/loss_compressed"] == 2.75
    assert found["own/mine"] == 4.0
    assert (found["bytes/shards_weights"], found["bytes/shards_gradients"]) == (5, 6)
    assert "eval/loss" not in scalars(record(1))
    assert "train/grad_norm" not in scalars(record(1, grad_norm=None))


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write("tensorboard", tmp_path, range(1, 8))
    write("tensorboard", tmp_path, range(5, 10), done=4)  # 5, 6, 7 are done again
    found = events(tmp_path)
    losses = found.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 10))
    assert [event.value for event in losses] == [pytest.approx(10.0 / s) for s in range(1, 10)]
    assert [event.step for event in found.Scalars("eval/loss")] == [2, 4, 6, 8]
    assert set(found.Tags()["scalars"]) == set(scalars(record(2)))


def test_tensorboard_on_a_full_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    where = place(tmp_path)
    with (
        WriterThread("tensorboard", partial(open_writer, "tensorboard", where)) as outlet,
        full_disk(),
    ):
        for step in range(1, 200):
            outlet.add(step, scalars(record(step)))
        outlet.__exit__()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("warning: tensorboard: ")


@pytest.mark.slow
def test_wandb_keeps_one_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write("wandb", tmp_path, range(1, 4))
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second, PATIENCE_S)  # wandb names folders by the second
    write("wandb", tmp_path, range(3, 6), done=2)

    def logged() -> list[dict[str, str]]:
        files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
        assert {file.name for file in files} == {
            f"run-{(tmp_path / 'run_id').read_text(encoding='utf-8')}.wandb"
        }
        return [item for file in files for item in history(file)]

    wait_until(lambda: len(logged()) == 6, PATIENCE_S)  # another process writes the files
    found = logged()
    assert [int(item["step"]) for item in found] == [1, 2, 3, 3, 4, 5]
    assert float(found[3]["train/loss"]) == pytest.approx(10 / 3)
    assert float(found[1]["eval/loss"]) == 2.5


def history(file: Path) -> list[dict[str, str]]:
    """What was logged, from a file of wandb: a log of LevelDB's with a protocol buffer a record."""
    message = import_module("wandb.proto.wandb_internal_pb2").Record
    data, place, part = file.read_bytes(), 7, b""
    found = []
    while place + 7 <= len(data):
        if (left := -place % 32_768) and left < 7:  # a block's end, too short for a header
            place += left
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):  # it is being written
            break
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or last
            item, part = message.FromString(part), b""
            if item.WhichOneof("record_type") == "history":
                found.append({i.key or i.nested_key[0]: i.value_json for i in item.history.item})
    return found


def test_trackio_keeps_one_run_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    write("trackio", tmp_path, range(1, 4))
    write("trackio", tmp_path, range(4, 6), done=3)
    name = f"run-{(tmp_path / 'run_id').read_text(encoding='utf-8')}"
    (run,) = trackio.Api().runs("tests")
    assert run.name == name
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    logs = storage.get_logs("tests", run.name, run_id=run.id)
    assert [(item["step"], item["train/loss"]) for item in logs] == [
        (step, 10 / step) for step in range(1, 6)
    ]


@pytest.mark.parametrize("tool", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_extra(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tool, None)
    with pytest.raises(ValueError, match=rf'report\.writers has "{tool}": the package'):
        check_writers([tool])
    with pytest.raises(ValueError, match=re.escape(f"'thinpipe[{tool}]'")):
        check_writers([tool])


def test_a_run_whose_id_cannot_be_kept_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run_id").mkdir()
    assert len(place(tmp_path).run_id) == 8
    assert len(place(tmp_path, done=3).run_id) == 8
    assert caplog.text.count("run_id: Is a directory") == 1


def test_an_unknown_tool_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[report]\nwriters = ["tensorbord"]\n')
    with pytest.raises(ConfigError, match="tensorboard"):
        load_config(tmp_path / "run.toml")


def test_settings_of_writers_are_a_hosts_own(tmp_path: Path) -> None:
    assert config(tmp_path, "wandb").digest() == config(tmp_path).digest()
    assert math.isnan(scalars(record(1, loss=math.nan))["train/loss"])
