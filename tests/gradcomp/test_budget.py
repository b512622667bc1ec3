"""Filling the slot: the choice by hand, the same on all replicas, and in a run."""

import logging
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.budget import Budget, choose
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.methods.cocktail import CHOICES, Config, TopKChoice

START = TopKChoice(0.1, 0.2, 4)


def numbers(*pairs: tuple[float, float]) -> list[torch.Tensor]:
    return [torch.tensor(pair) for pair in pairs]


def test_the_most_that_fits_is_chosen() -> None:
    # two replicas send every parameter once: 1e6 parameters at 0.6 bits are 0.6 Mbit
    assert choose(CHOICES, numbers((1.0, 0.76e6), (1.0, 0.76e6)), numel=1_000_000) == TopKChoice(
        0.3, 0.3, 4
    )
    assert choose(CHOICES, numbers((1.0, 0.74e6), (1.0, 0.76e6)), numel=1_000_000) == TopKChoice(
        0.2, 0.2, 4
    )
    assert choose(CHOICES, numbers((0.9, 0.76e6), (1.0, 0.76e6)), numel=1_000_000) == TopKChoice(
        0.2, 0.2, 4
    )


def test_at_the_ends_it_takes_the_least_and_the_most() -> None:
    assert choose(CHOICES, numbers((1.0, 1.0), (1.0, 1e9)), numel=1_000_000) == min(
        CHOICES, key=CHOICES.get
    )
    assert choose(CHOICES, numbers((1.0, 1e9), (1.0, 1e9)), numel=1_000_000) == TopKChoice(
        1.0, 1.0, 8
    )


def test_nothing_is_chosen_before_all_have_measured() -> None:
    assert choose(CHOICES, numbers((1.0, 1e9), (0.0, 1e9)), numel=10) is None


def test_replicas_that_measured_differently_choose_alike(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    budgets = [Budget(peers, START, 1_000_000, CHOICES) for peers in local_peers(3)]
    for rank, budget in enumerate(budgets):
        budget.slot(1.0 + rank)
        budget._rate_bps = 4e6 / (1 + rank)
    all_of(budgets, lambda budget: budget.agree(0))
    assert {budget.choice for budget in budgets} == {TopKChoice(0.3, 0.3, 4)}
    assert "exchange 0: TopKChoice(subset=0.3, topk=0.3, bits=4)" in caplog.text


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("cocktail", {"subset": 1.0, "topk": 1.0, "bits": 8}),
        ("ef_updates", {"subset": 1.0, "bits": 8}),
    ],
)
def test_a_run_fills_its_slot_and_replicas_stay_together(
    method: str, most: dict[str, float]
) -> None:
    replicas = Replicas(2, method, {"budget": "auto", "bucket_mb": 1e-4})
    for sync in replicas.syncs:
        sync._budget._slot_s = 1e9  # type: ignore[attr-defined]
    for _ in range(18):
        replicas.step()
        first, second = replicas.global_parameters()
        assert torch.equal(first, second)
    chosen = [sync.state_dict()["choice"] for sync in replicas.syncs]
    assert chosen == [most] * 2


def test_there_is_no_slot_to_fill_without_delay() -> None:
    with pytest.raises(ValidationError, match="use delayed = true"):
        Config(budget="auto", delayed=False)
