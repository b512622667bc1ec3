"""What is measured where values are encoded, and the guard that judges it."""

import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.training import batch, config, start, train_steps
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.memory import SampleMemory
from thinpipe.launch.components import Built
from thinpipe.launch.single_process import in_process
from thinpipe.pipeline.comm.boundary import Boundary, Stateless
from thinpipe.pipeline.comm.error_stats import ErrorStats, error_stats
from thinpipe.pipeline.comm.guard import Guard, GuardConfig, Rule
from thinpipe.pipeline.step_stats import StepTotals
from thinpipe.pipeline.wire.hadamard import Hadamard

PLACE = (2, 0)


def encode(end: Boundary, x: torch.Tensor, ids: list[int]) -> None:
    ids_B = torch.tensor(ids)
    plan = end.plan(ids_B, x.shape, step=0)
    end.encode(plan, x, torch.empty(plan.capacity, dtype=torch.uint8))


def test_a_stateless_boundary_measures_its_error() -> None:
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    end = Stateless(Hadamard(4))
    encode(end, x, [1, 2, 3])
    codec, decoded = Hadamard(4), torch.empty(1, 128)
    codec.encode(x[:1].flatten(1), torch.empty(1, codec.capacity(128), dtype=torch.uint8), decoded)
    found = error_stats(end.error_meter.take())
    assert (found.known, found.first_visits, found.change) == (0, 3, None)
    expected = float((decoded - x[:1].flatten(1)).norm() / x[0].norm())
    assert found.error == pytest.approx(expected)
    assert error_stats(end.error_meter.take()) == ErrorStats()


def test_a_delta_boundary_measures_changes() -> None:
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    end = build_delta(AqsgdConfig(bits=8, memory="fp32", first_visit="fp32"), width=16, key=0)
    encode(end, x, [4, 5])
    end.finish_step(keep=True)
    assert error_stats(end.error_meter.take()) == ErrorStats(0, 2, 0.0, None)
    encode(end, 1.25 * x, [4, 6])
    found = error_stats(end.error_meter.take())
    assert (found.known, found.first_visits) == (1, 1)
    assert found.change == pytest.approx(0.2)
    assert found.error is not None
    assert 0 < found.error < 0.01


def test_what_is_not_finite_is_not_measured() -> None:
    x = torch.full((1, 8, 16), math.nan)
    end = Stateless(Hadamard(4))
    encode(end, x, [1])
    assert error_stats(end.error_meter.take()) == ErrorStats(0, 1, None, None)


def judge(guard: Guard, *signals: ErrorStats) -> list[str]:
    return [note for found in signals for note in guard.judge({PLACE: found})]


def make(mode: Any, fallbacks: int = 2, **options: Any) -> Guard:
    return Guard({PLACE: Rule(GuardConfig(mode=mode, patience=4, **options), fallbacks)}, [])


def test_shrinking_changes_are_no_problem() -> None:
    signals = [ErrorStats(1, 0, 0.2, 0.9 * 0.95**step) for step in range(60)]
    assert judge(make("act"), *signals) == []


def test_growing_changes_are_told_once() -> None:
    """Ternary levels at 2 bits: changes grow from 0.23 to 0.47 of the activations."""
    signals = [ErrorStats(1, 0, 0.2, 0.23 + 0.01 * step) for step in range(40)]
    (note,) = judge(make("warn"), *signals)
    assert "cut 2 forward: changes have grown from 0.2" in note
    assert 'guard.mode = "act"' in note
    assert judge(make("off"), *signals) == []


def test_small_changes_may_grow() -> None:
    """From nothing to a tenth, as when a learning rate warms up."""
    assert judge(make("act"), *[ErrorStats(1, 0, 0.1, 0.002 * step) for step in range(1, 50)]) == []


def test_a_large_error_escalates_and_then_warns() -> None:
    notes = judge(make("act", error=0.5), *[ErrorStats(0, 1, 0.7)] * 30)
    assert len(notes) == 3
    assert all("the error is 0.70" in note for note in notes)
    assert ["stateless" in note for note in notes] == [True, True, False]


def test_one_outlier_is_not_a_trend() -> None:
    assert (
        judge(
            make("act"), *[ErrorStats(0, 1, 0.1)] * 5, ErrorStats(0, 1, 1.5), ErrorStats(0, 1, 0.1)
        )
        == []
    )


def test_a_restored_guard_goes_on_alike() -> None:
    signals = [ErrorStats(1, 0, 0.2, 0.23 + 0.01 * step) for step in range(40)]
    whole, first, second = make("act"), make("act"), make("act")
    notes = judge(first, *signals[:17])
    second.load_state_dict(first.state_dict())
    assert judge(whole, *signals) == notes + judge(second, *signals[17:])
    assert whole.state_dict() == second.state_dict()


def guarded() -> Any:
    return config(
        boundary=[
            {
                "forward": {"kind": "aqsgd", "bits": 2},
                "backward": {"kind": "direct", "bits": 2},
                "guard": {"mode": "act", "error": 0.25, "patience": 2},
            }
        ],
        train={"lr": 0.02, "epochs": 9},
    )


def levels(built: Built, totals: StepTotals) -> tuple[Any, ...]:
    places = {
        (codec.cut, codec.direction): (codec.level, codec.training.bits)
        for codec in (channel.codec for channel in built.engine.channels)
    }
    return places, totals.notes, [(wire.error, wire.nbytes) for wire in totals.wire]


def _train_guarded(rank: int) -> tuple[list[float], list[Any]]:
    losses, _, seen = train_steps(rank, guarded(), [batch([*range(8)])] * 10, levels)
    return losses, seen


def _train_and_restore(rank: int) -> tuple[list[float], list[Any]]:
    """After half the steps levels and means are lost, and come back with the engine's state."""
    built = start(guarded())
    losses, seen = [], []
    for step in range(10):
        if step == 5:
            state = built.engine.state_dict()
            for channel in built.engine.channels:
                channel.codec.level = 0
            built.engine.load_state_dict({"pass": state["pass"]})
            built.engine.load_state_dict(state)
        totals = built.engine.train_step(batch([*range(8)]), step)
        losses.append(totals.loss)
        seen.append(levels(built, totals))
    return losses, seen


@pytest.mark.dist
def test_all_ranks_change_at_the_same_step_and_resume_so(ranks: Ranks) -> None:
    (losses, one), (other_losses, other) = ranks(2, _train_guarded)
    assert losses == other_losses
    assert one == other
    places, _, wire = one[-1]
    assert places[2, 1][0] == 1  # 2-bit gradients missed the bound; 4 bits keep it
    assert any(note.startswith("cut 2 backward") for _, notes, _ in one for note in notes)
    assert wire[1][1] > one[0][2][1][1]  # bytes grew with the bits
    assert wire[1][0] < 0.25
    assert ranks(2, _train_and_restore)[0] == (losses, one)


@pytest.mark.dist
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_cut_that_leaves_aqsgd_gives_its_memory_back(tmp_path: Path, tier: str) -> None:
    boundary = {
        "forward": {"kind": "aqsgd", "bits": 1},
        "guard": {"mode": "act", "error": 1e-3, "patience": 2},
    }
    run = config(
        boundary=[boundary],  # type: ignore[arg-type]
        memory={"tier": tier, "folder": str(tmp_path), "budget": "1MB"},
    )
    item = batch([*range(8)])
    with in_process(run, total_steps=9) as built:
        built.engine.begin(item.ids_B, item.ids_B)
        built.engine.train_step(item, 0, item.ids_B)
        kept = [weakref.ref(memory._store.row(5)) for memory in memories(built)]
        assert all(row() is not None for row in kept)
        assert [built.engine.train_step(item, step, item.ids_B).repaired for step in (1, 2)] == [
            ()
        ] * 2
        assert [len(memory) for memory in memories(built)] == [0, 0]
        assert [row() for row in kept] == [None, None]
        assert space_taken(built) == 0
        saved = built.engine.state_dict()
        built.engine.close()
    with in_process(run, total_steps=9) as built:
        built.engine.load_state_dict(saved)
        built.engine.begin(item.ids_B, item.ids_B)
        built.engine.train_step(item, 3)
        assert [len(memory) for memory in memories(built)] == [0, 0]
        assert space_taken(built) == 0
        built.engine.close()


def memories(built: Built) -> list[SampleMemory]:
    memories = [channel.codec.memory for channel in built.engine.channels]
    return [memory for memory in memories if isinstance(memory, SampleMemory)]


def space_taken(built: Built) -> int:
    """Bytes on disk, which has room set aside while samples are remembered."""
    files: list[Any] = [getattr(memory._store, "_file", None) for memory in memories(built)]
    return sum(os.fstat(file.descriptor).st_blocks for file in files if file is not None)
