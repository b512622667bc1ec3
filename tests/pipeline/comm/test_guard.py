"""What is measured where values are encoded, and the guard that judges it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import batch, config, start
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.pipeline.comm.boundary import Boundary, Stateless
from thinpipe.pipeline.comm.error_stats import error_stats
from thinpipe.pipeline.comm.guard import Guard
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.told import ErrorStats

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
    wire = torch.empty(1, codec.capacity(128), dtype=torch.uint8)
    codec.encode(x[:1].flatten(1), wire, decoded, noise=None)
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
    found = error_stats(end.error_meter.take())
    assert (found.known, found.first_visits, found.error, found.change) == (0, 2, 0.0, None)
    encode(end, 1.25 * x, [4, 6])
    found = error_stats(end.error_meter.take())
    assert (found.known, found.first_visits) == (1, 1)
    assert found.change == pytest.approx(0.2)
    assert found.error is not None
    assert 0 < found.error < 0.01


def judge(guard: Guard, *signals: ErrorStats) -> list[str]:
    return [note for found in signals for note in guard.judge({PLACE: found})]


def make() -> Guard:
    return Guard({PLACE: 'use kind = "stateless"'})


GROWING = [ErrorStats(1, 0, 0.2, 0.23 + 0.01 * step) for step in range(80)]
"""Ternary levels at 2 bits: changes grow from 0.23 to 0.47 of the activations."""
FINE = ErrorStats(0, 1, 0.1)
SUITED = ErrorStats(0, 1, 0.05, channel_error=0.1, largest_channel=507, largest_share=0.98)
LOST = replace(SUITED, channel_error=0.45)


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        (
            GROWING,
            "changes have grown from 0.33 to 0.49 of the activations instead of shrinking; use "
            "more bits (transform: a smaller step), or raw",
        ),
        (
            [ErrorStats(0, 1, 0.7)] * 60,
            "the error is 0.70 of the values, the limit is 0.6; use more bits (transform: a "
            "smaller step), or raw",
        ),
        (
            [LOST] * 60,
            "channel 507 holds 98% of the energy, and half of the others have an error of 45% of "
            'their own or more; use kind = "stateless"',
        ),
    ],
    ids=["growing changes", "large error", "a massive channel"],
)
def test_what_goes_wrong_is_told_once(signals: list[ErrorStats], told: str) -> None:
    assert judge(make(), *signals) == [f"cut 2 forward: {told}"]


@pytest.mark.parametrize(
    "signals",
    [
        [ErrorStats(1, 0, 0.2, 0.9 * 0.95**step) for step in range(60)],  # changes shrink
        # from nothing to a tenth, as when a learning rate warms up
        [ErrorStats(1, 0, 0.1, 0.002 * step) for step in range(1, 50)],
        [*[FINE] * 25, ErrorStats(0, 1, 1.5), FINE],  # one outlier is not a trend
        [SUITED] * 60,
        [replace(LOST, largest_share=0.1)] * 60,
        [LOST] * 19,
        [LOST] * 8 + [SUITED] * 40,
    ],
)
def test_a_codec_that_suits_its_values_is_not_blamed(signals: list[ErrorStats]) -> None:
    assert judge(make(), *signals) == []


def test_a_restored_guard_goes_on_alike() -> None:
    whole, first, second = make(), make(), make()
    notes = judge(first, *GROWING[:37])
    second.load_state_dict(first.state_dict())
    assert judge(whole, *GROWING) == notes + judge(second, *GROWING[37:])
    assert whole.state_dict() == second.state_dict()


def _with_and_without_restart(rank: int) -> Any:
    return [_train_and_restore(stop_at) for stop_at in (None, 12)]


def _train_and_restore(stop_at: int | None) -> Any:
    """Notes of all steps; at one of them means are lost, and come back with the engine's state."""
    run = config(boundary=[{"forward": {"kind": "direct", "bits": 1}}])
    built, notes = start(run), []
    for step in range(24):
        if step == stop_at:
            state = built.engine.state_dict()
            built.engine.load_state_dict({"pass": state["pass"]})
            built.engine.load_state_dict(state)
        notes.append(built.engine.train_step(batch([*range(8)]), step).notes)
    return notes


@pytest.mark.dist
def test_all_ranks_are_told_in_the_same_step_and_resume_so() -> None:
    one, other = run_ranks(2, _with_and_without_restart)
    assert one == other
    whole, resumed = one
    assert any(note.startswith("cut 2 forward") for notes in whole for note in notes)
    assert resumed == whole
