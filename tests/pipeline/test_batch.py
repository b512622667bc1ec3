"""Padding, packing, prefixes, labels and repeated dropout masks under every way to run a step."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import run_ranks
from tests.training import (
    RAW,
    TOKENS,
    TORCH_2_13,
    batch,
    config,
    single_process,
    start,
    train_steps,
    weights,
)
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.metrics import Measures


def padded(ids: list[int]) -> Batch:
    """Sequences of 3 to TOKENS real tokens."""
    whole = batch(ids)
    lengths_B = 3 + whole.ids_B * 5 % (TOKENS - 2)
    mask_BT = torch.arange(TOKENS) < lengths_B[:, None]
    targets = whole.targets.masked_fill(~mask_BT, -100)
    return replace(whole, targets=targets, mask_BT=mask_BT)


def packed(ids: list[int]) -> Batch:
    """Two examples per sequence, each with a prompt of two tokens, and two tokens of padding."""
    whole = batch(ids)
    places_T = torch.arange(TOKENS)
    borders_B1 = 4 + whole.ids_B[:, None] % 3
    segments_BT = torch.where(places_T < borders_B1, 1, 2)
    segments_BT[:, -2:] = 0
    prefix_BT = (places_T < 2) | ((places_T >= borders_B1) & (places_T < borders_B1 + 2))
    return replace(
        whole,
        targets=whole.targets.masked_fill(segments_BT == 0, -100),
        mask_BT=segments_BT != 0,
        segments_BT=segments_BT,
        prefix_BT=prefix_BT,
    )


def labelled(ids: list[int]) -> Batch:
    whole = padded(ids)
    return replace(whole, targets=whole.ids_B % 3)


CLASSIFY: dict[str, Any] = {"task": "classification", "classes": 3}
REPEATED: dict[str, Any] = {"dropout": 0.2, "dropout_masks": "repeated"}
IDS = [list(range(8)), [9, 11, 13, 15, 17], [3, 1, 0, 2, 7, 6]]
CASES: dict[str, tuple[Callable[[list[int]], Batch], dict[str, Any]]] = {
    "padding": (padded, {}),
    "packing": (packed, {"activation_checkpointing": True}),
    "labels": (labelled, CLASSIFY),
    "dropout": (labelled, {**CLASSIFY, **REPEATED, "activation_checkpointing": True}),
    "packing and dropout": (packed, REPEATED),
}
SCHEDULES = [
    pytest.param(4, ["GPipe", "Deep1F1B"], id="one stage per rank"),
    pytest.param(2, ["Interleaved1F1B"], id="two stages per rank", marks=pytest.mark.slow),
    pytest.param(2, ["ZBVZeroBubble"], id="split backward", marks=TORCH_2_13),
]


def task_config(model: dict[str, Any], **sections: Any) -> RunConfig:
    fields = {"text_field": "text", "label_field": "label"} if "task" in model else {}
    return config(model=model, data=fields, train={"clip_norm": 0}, **sections)


Runs = list[tuple[RunConfig, list[Batch]]]


def train_all(rank: int, runs: Runs) -> list[Any]:
    return [train_steps(rank, run, batches) for run, batches in runs]


@pytest.mark.dist
@pytest.mark.parametrize(("count", "schedules"), SCHEDULES)
def test_every_schedule_equals_one_process(count: int, schedules: list[str]) -> None:
    runs: Runs = []
    for make, model in CASES.values():
        for schedule in schedules:
            run = task_config(model, pipeline={"schedule": schedule, "cuts": [1, 2, 3]})
            runs.append((run, [make(ids) for ids in IDS]))
    alone = [single_process(*run) for run in runs]
    for of_rank in run_ranks(count, train_all, runs):
        for (losses, found, _), (expected_losses, expected) in zip(of_rank, alone, strict=True):
            assert losses == expected_losses
            assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize("case", [case for case in CASES if case != "padding"])
def test_what_samples_say_changes_the_loss(case: str) -> None:
    """So that the equalities above do not hold because everybody looks away."""
    make, model = CASES[case]
    whole = make(IDS[0])
    blind = Batch(whole.inputs_BT, whole.targets, whole.ids_B + 100)
    run = task_config(model)
    assert single_process(run, [whole])[0] != single_process(run, [blind])[0]


class Confusion:
    """How often each class was taken for which: 7 labels, in rows of the true class."""

    def tally(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        known = targets >= 0
        return torch.bincount(3 * targets[known] + outputs[known].argmax(-1), minlength=9)

    def value(self, tally: torch.Tensor) -> float:
        assert tally.view(3, 3).sum(1).tolist() == [3, 2, 2]
        return float(tally.sum())


def evaluate(rank: int, run: RunConfig, item: Batch) -> tuple[float, ...]:
    engine, measures = start(run).engine, Measures({"labels": Confusion()})
    head = engine.eval_step(item, 0, compressed=False, measures=measures)
    return (*head, measures.values(engine.transport.gather(measures.packed()))["labels"])


@pytest.mark.dist
def test_evaluation_counts_labels_on_all_ranks() -> None:
    item = replace(labelled(IDS[0]), targets=torch.tensor([0, 1, 2, 0, 1, 2, -100, 0]))
    run = task_config(CLASSIFY, pipeline={"cuts": [1, 2]})
    found = run_ranks(3, evaluate, run, item)
    assert found[0] == found[1] == found[2]
    loss, count, labels = found[0]
    expected, _ = single_process(run, [item])
    assert loss / count == pytest.approx(expected[0], rel=1e-6)
    assert count == labels == 7


def test_padding_changes_nothing() -> None:
    """A sample's loss is the same with more padding after it."""
    long = labelled([4])
    real = int(long.mask_BT.sum())  # type: ignore[union-attr]
    assert real < TOKENS
    short = replace(long, inputs_BT=long.inputs_BT[:, :real], mask_BT=None)
    run = task_config(CLASSIFY)
    both = [single_process(run, [item])[0][0] for item in (long, short)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


def test_a_step_of_which_no_target_counts_changes_nothing_and_has_no_loss() -> None:
    """A loss of 0 would be the best there is, and AdamW would still move the weights."""
    item = batch(IDS[0])
    nothing = replace(item, targets=torch.full_like(item.targets, -100))
    with in_process(config(), total_steps=3) as built:
        engine = built.engine
        assert not engine.train_step(item, 0).skipped
        before = {name: weight.clone() for name, weight in weights(built).items()}
        totals = engine.train_step(nothing, 1)
        assert math.isnan(totals.loss)
        assert totals.skipped
        assert totals.tokens == 0
        assert all(torch.equal(weight, before[name]) for name, weight in weights(built).items())
        assert engine.eval_step(nothing, 1, compressed=False) == (0.0, 0.0)
        assert not engine.train_step(item, 2).skipped


def test_a_module_that_is_not_told_is_not_given_padding() -> None:
    with in_process(config(), total_steps=1) as built:
        built.stages[0].submod = torch.nn.Embedding(256, 16)
        built.engine.eval_step(batch(IDS[0]), 0, compressed=False)
        with pytest.raises(ValueError, match=r"stage 0: Embedding would ignore padding"):
            built.engine.eval_step(padded(IDS[0]), 0, compressed=False)


AQSGD = {"forward": {"kind": "aqsgd", "bits": 8}, "backward": RAW}


@pytest.mark.parametrize(("masks", "low", "high"), [("repeated", 0, 0.3), ("random", 0.5, 1)])
def test_repeated_masks_keep_changes_small(masks: str, low: float, high: float) -> None:
    """How far the second visit moves what AQ-SGD caches, relative to its size."""
    run: Any = config(
        model={"dropout": 0.1, "dropout_masks": masks}, boundary=[AQSGD], train={"lr": 1e-3}
    )
    items = [batch(IDS[0]), batch([20, 21, 22, 23]), batch(IDS[0])]
    seen = []
    with in_process(run, total_steps=3) as built:
        torch.manual_seed(0)
        for step, item in enumerate(items):
            built.engine.train_step(item, step)
            (codec,) = (c.codec for c in built.stages[0].channels.outgoing())
            sender: Any = codec.training
            seen.append(sender.memory.read(items[0].ids_B, TOKENS * run.model.width).clone())
    change = float((seen[2] - seen[0]).norm() / seen[2].norm())
    assert low < change < high
