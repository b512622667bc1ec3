"""Hours to a loss: what is run, what slept stages send, and how hours are summed up."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.harness import write_tokenizer
from benchmarks.links.workloads import PaperShape
from benchmarks.shards import speed
from benchmarks.time_to_loss import losses, plan, seconds
from benchmarks.time_to_loss.__main__ import QUICK, main
from benchmarks.time_to_loss.hours import compose, table
from benchmarks.time_to_loss.record import record
from benchmarks.time_to_loss.tasks import BASELINE, LAYOUTS, METHODS, Task, gpt2
from tests.texts import write_words
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.config.run import RunConfig


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_words(tmp_path_factory.mktemp("texts"), 15_000)


@pytest.fixture(scope="module")
def task(texts: tuple[Path, Path]) -> Task:
    tokenizer = texts[0].with_name("tokenizer")
    write_tokenizer(tokenizer, texts[0], vocab=300)
    shape = {"layers": 4, "width": 16, "heads": 2, "vocab": 300, "context": 16}
    small = replace(gpt2(tokenizer), model=shape, layers=4, width=16, tokens=16)
    return replace(small, sequences=16, epochs=2, held_out=4, parameters=20_000)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_method_is_a_valid_run(layout: Any, task: Task, texts: tuple[Path, Path]) -> None:
    for method in METHODS[layout]:
        file = losses.run_file(task, layout, method, texts=texts, seed=1, lr=1e-3)
        config = RunConfig.model_validate(file)
        how = LAYOUTS[layout]
        assert config.world_size == how.stages * how.replicas * how.shards
        assert config.train.lr == 1e-3


def test_what_is_recorded_is_what_slept_stages_send(
    task: Task, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    file = losses.run_file(task, "pipeline", BASELINE, texts=texts, seed=0, lr=1e-2)
    record(RunConfig.model_validate(file), tmp_path / "visits.pt")
    visits = torch.load(tmp_path / "visits.pt")
    assert len(visits) == task.epochs
    forward, backward = visits[0]
    assert len(forward) == len(backward) == 3
    assert forward[0].shape == (task.microbatches, 2, task.tokens, task.width)
    assert not torch.equal(forward[1], visits[1][0][1])
    shape = PaperShape(16, 16, 4, 0.0, 0.0, samples=2, recorded=tmp_path / "visits.pt")
    stage = shape.module(1, 4, torch.float32)
    sent = []
    for ids_S in (torch.arange(8), torch.arange(8), torch.arange(8, 16)):
        stage.begin_step(ids_S)
        sent.append([stage.next_output() for _ in range(4)])
    assert torch.equal(torch.stack(sent[0]), forward[1])
    assert torch.equal(torch.stack(sent[1]), visits[1][0][1])
    assert torch.equal(torch.stack(sent[2]), forward[1])
    stage.begin_step(torch.arange(8))
    assert torch.equal(stage.next_gradient(), backward[0][0])  # before the last visit again


def test_hours_are_the_sum_over_steps_and_gaps_are_to_the_baseline_of_a_seed() -> None:
    def trained(method: str, seed: int, final: float, lr: float = 1e-3) -> dict[str, Any]:
        sent = {kind: [1, 2] for kind in ("cut_bytes", "sync_bytes", "shard_bytes")}
        about = {"task": "t", "layout": "pipeline", "method": method, "seed": seed, "lr": lr}
        return {**about, "steps": 30, "epochs": 3, "final": final, **sent}

    def timed(method: str, rate: float | None, first_s: float, later_s: float) -> dict[str, Any]:
        about = {"task": "t", "layout": "pipeline", "gpu": "g", "delay_ms": 0.0}
        return {**about, "method": method, "rate_bps": rate, "first_s": first_s, "later_s": later_s}

    known = [trained("fp32", 0, 3.0), trained("fp32", 1, 3.2)]
    known += [trained("x", 0, 3.005), trained("x", 1, 3.207), trained("x", 0, 4.0, 1e-2)]
    seconds_of = [timed("x", 1e8, 72.0, 36.0), timed("fp32", 1e8, 360.0, 360.0)]
    rows = compose(known, [*seconds_of, timed("fp32", None, 36.0, 36.0)])
    found = {(row.method, row.link): row for row in rows}
    assert found["x", 1e8].hours == pytest.approx((10 * 72 + 20 * 36) / 3600)
    assert found["x", 1e8].hours_uncompressed_free == pytest.approx(0.3)
    assert found["x", 1e8].final_gap == pytest.approx(0.006)
    assert found["x", 1e8].worst_gap == pytest.approx(0.007)
    assert found["x", 1e8].bytes == 9
    assert "**0.4**" in table(rows, "t", "pipeline", "g")


def test_what_torch_has_itself_has_the_losses_of_a_method_of_ours() -> None:
    for layout, named in seconds.TORCH.items():
        assert {*named.values()} <= METHODS[layout].keys()
    assert {*METHODS["shards"], *seconds.TORCH["shards"]} == {*seconds._SHARDS}
    assert {*seconds._SHARDS.values()} <= {*speed.OURS, *speed.TORCHS}
    for name, settings in METHODS["shards"].items():
        assert ShardsConfig(**settings["shards"]) == speed.OURS[seconds._SHARDS[name]]


def test_a_quick_look_is_at_methods_that_there_are() -> None:
    for layout, names in QUICK.items():
        assert {*names} <= {*METHODS[layout], *seconds.TORCH.get(layout, ())}


def test_methods_too_slow_to_wait_for_are_told_apart() -> None:
    divided = seconds._divided("replicas", ["fp32", "DiLoCo", "DeMo"], {"fp32": 10_000_000}, 1e6)
    assert divided == (["DeMo"], ["DiLoCo"], ["fp32"])


@pytest.mark.slow
def test_losses_are_those_of_a_run_and_are_measured_once(
    texts: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--train", str(texts[0]), "--eval", str(texts[1]), "--json", str(out)]
    words += ["--quick", "--layouts", "pipeline", "--methods", "bf16", "--share", "0.01"]
    main([*words, "--parts", "losses"])
    before = out.read_text(encoding="utf-8")
    assert before.count("\n") == 2
    main([*words, "--parts", "losses", "hours"])
    assert out.read_text(encoding="utf-8") == before


def test_more_epochs_are_another_task(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: Task, *_: Any, **__: Any) -> dict[str, Any]:
        return {"final": 1.0, "cut_bytes": [0] * task.steps}

    monkeypatch.setattr(losses, "measure", measure)
    out = tmp_path / "rows.jsonl"
    words = ["--train", str(texts[0]), "--eval", str(texts[1]), "--json", str(out)]
    words += ["--layouts", "one", "--parts", "losses", "--seeds", "1"]
    main(words)
    main([*words, "--epochs", "3"])
    rows = [json.loads(line)["result"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["task"] for row in rows] == ["gpt2", "gpt2, 3 epochs"]
    assert [row["epochs"] for row in rows] == [1, 3]
    assert rows[1]["steps"] == len(rows[1]["cut_bytes"]) == 3 * rows[0]["steps"]


def test_a_run_over_links_is_composed_of_a_short_ones_steps(
    task: Task, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each epoch by its own median; a first step that is slow counts for itself alone."""

    def train(settings: Any, _folder: Path, *over: str) -> list[SimpleNamespace]:
        assert over == ("shaped", "--hosts", "4", "--rate", "100mbit", "--")
        steps = settings["data"]["train_sequences"] // task.batch
        seconds = [9.0, *[2.0] * (steps - 1), *[0.5] * steps]
        return [SimpleNamespace(step_s=s, epoch=1 + n // steps) for n, s in enumerate(seconds)]

    monkeypatch.setattr(losses, "train", train)
    found = losses.compare(task, "pipeline", "AQ-SGD 3/6", "100mbit", texts=texts)
    assert (found["seconds"], found["composed"]) == (257.0, 250.0)


def test_plan_is_told_the_gaps_that_are_known(tmp_path: Path) -> None:
    about = {"task": "gpt2", "layout": "replicas", "lr": 1e-3, "seed": 0, "steps": 9}
    ends = (("fp32", 5.0), ("DeMo", 5.03), ("ef_gradients .03", 4.98))
    losses: list[dict[str, Any]] = [
        {**about, "method": method, "final": end} for method, end in ends
    ]
    losses.append({**losses[1], "steps": 2, "final": 7.0})  # of a short run
    for method, end in (("fp32", 2.0), ("ef_gradients .03", 2.005)):
        losses.append({**losses[0], "task": "smollm2", "method": method, "final": end})
    parity = tmp_path / "parity.jsonl"
    kinds = (("demo", {"kept": 24}, -0.02), ("ef_gradients", {"fraction": 0.03}, -0.03))
    with parity.open("w", encoding="utf-8") as file:
        for name, options, gap in kinds:
            method = {"name": name, "options": options, "rate": 1.0}
            config = {"method": method, "setting": {"name": "gpt2"}}
            result = {"replicas": 4, "lr": 3e-4, "seed": 0, "held_out_gap": gap}
            file.write(json.dumps({"config": config, "result": result}) + "\n")
    plan.write(losses, parity, tmp_path / "losses.json")
    found = json.loads((tmp_path / "losses.json").read_text(encoding="utf-8"))
    assert found == [
        {"method": "allreduce", "options": {}, "fine_tuning": 0.0, "from_scratch": 0.0},
        {
            "method": "ef_gradients",
            "options": {"fraction": 0.03},
            "fine_tuning": 0.005,
            "from_scratch": -0.02,
        },
        {"method": "demo", "options": {"kept": 24}, "fine_tuning": -0.02, "from_scratch": 0.03},
    ]
