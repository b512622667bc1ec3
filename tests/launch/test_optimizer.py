"""Learning rates: whose they are, and that nothing puts them back in silence."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.optimizer import Rates


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)


def halved(step: int) -> float:
    return 0.5**step


def train(optimizer: torch.optim.Optimizer, rates: Rates, own: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(5):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step()
        own()
    return found


def test_a_factor_is_what_torchs_scheduler_makes_of_it_and_is_restored() -> None:
    ours, torchs = sgd(), sgd()
    scheduler = LambdaLR(torchs, halved)
    expected = train(torchs, Rates(torchs, None), scheduler.step)
    assert train(ours, Rates(ours, halved), lambda: None) == expected
    again = sgd()
    resumed = Rates(again, halved)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    resumed.last_epoch = 2
    assert again.param_groups[0]["lr"] == expected[2]
    resumed.step()
    assert again.param_groups[0]["lr"] == expected[3]


def test_without_a_factor_a_programs_scheduler_sets_them() -> None:
    alone, ours = sgd(), sgd()
    schedulers = [OneCycleLR(optimizer, 1.0, total_steps=9) for optimizer in (alone, ours)]
    expected = []
    for _ in range(5):
        expected.append(alone.param_groups[0]["lr"])
        alone.step()
        schedulers[0].step()
    rates = Rates(ours, None)
    assert train(ours, rates, schedulers[1].step) == expected
    assert rates.has_scheduler


def test_two_that_set_them_are_refused() -> None:
    before, after = sgd(), sgd()
    LambdaLR(before, halved)
    with pytest.raises(ConfigError, match=r"has a torch LR scheduler; one of them must set .* Run"):
        Rates(before, halved)
    rates = Rates(after, lambda step: 1.0)
    late = LambdaLR(after, halved)
    with pytest.raises(ConfigError, match=r"set the learning rate of a group to one of \[0.15\]"):
        train(after, rates, late.step)
