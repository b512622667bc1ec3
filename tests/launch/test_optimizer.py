"""Learning rates: whose they are, and that nothing puts them back in silence."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)

from thinpipe.launch.checkpoint.state_file import load_state, save_state
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.optimizer import AdamW, Rates


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


def test_adamw_is_torchs_to_the_last_bit() -> None:
    drawn = torch.Generator().manual_seed(0)
    ours, torchs = nn.Linear(5, 3), nn.Linear(5, 3)
    torchs.load_state_dict(ours.state_dict())
    one, other = AdamW(ours.parameters(), 0.1), torch.optim.AdamW(torchs.parameters(), 0.1)
    one.register_step_post_hook(lambda *_: other.step())
    for number in range(4):
        if number == 2:
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        one.zero_grad()
        other.zero_grad()
        x = torch.randn(2, 5, generator=drawn)
        ours(x).square().sum().backward()
        torchs(x).square().sum().backward()
        one.step()
        for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert not mine.grad_fn


def test_a_factor_is_what_torchs_scheduler_makes_of_it_and_is_restored() -> None:
    ours, torchs = sgd(), sgd()
    scheduler = LambdaLR(torchs, halved)
    expected = train(torchs, Rates(torchs, None, [scheduler]), scheduler.step)
    assert train(ours, Rates(ours, halved), lambda: None) == expected
    again = sgd()
    resumed = Rates(again, halved)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    resumed.last_epoch = 2
    assert again.param_groups[0]["lr"] == expected[2]
    resumed.step()
    assert again.param_groups[0]["lr"] == expected[3]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: [MultiStepLR(optimizer, [1, 3, 3], 0.5)],
        lambda optimizer: [
            SequentialLR(
                optimizer,
                [LinearLR(optimizer, 0.1, total_iters=2), ExponentialLR(optimizer, 0.9)],
                [2],
            )
        ],
        lambda optimizer: [ConstantLR(optimizer, 0.5, 3), StepLR(optimizer, 2)],
    ],
)
def test_schedulers_go_on_where_a_checkpoint_left_them(
    tmp_path: Path, make: Callable[[torch.optim.Optimizer], list[LRScheduler]]
) -> None:
    def begin() -> tuple[torch.optim.SGD, Rates, Callable[[], None]]:
        optimizer = sgd()
        schedulers = make(optimizer)

        def step() -> None:
            for scheduler in schedulers:
                scheduler.step()

        return optimizer, Rates(optimizer, None, schedulers), step

    optimizer, rates, step = begin()
    train(optimizer, rates, step)
    save_state(tmp_path / "state", [optimizer.state_dict(), rates.state_dict()])
    expected = train(optimizer, rates, step)
    again, resumed, step = begin()
    of_optimizer, of_rates = load_state(tmp_path / "state")
    again.load_state_dict(of_optimizer)
    resumed.load_state_dict(of_rates)
    assert train(again, resumed, step) == expected
    assert len(set(expected)) > 1 or expected[0] != 0.3


def test_a_scheduler_that_the_run_cannot_save_is_rejected() -> None:
    unknown, strange, other = sgd(), sgd(), sgd()
    StepLR(unknown, 1)
    with pytest.raises(ConfigError, match=r"its state would not be saved; make it before the run"):
        Rates(unknown, None)
    late = sgd()
    rates = Rates(late, None)
    StepLR(late, 1)
    with pytest.raises(ConfigError, match="a torch LR scheduler that the run does not know"):
        rates.step()
    held = StepLR(strange, 1)
    held.own = object()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="StepLR whose state cannot be saved"):
        Rates(strange, None, [held])
    with pytest.raises(ConfigError, match="StepLR of another optimizer than the run's"):
        Rates(other, None, [StepLR(sgd(), 1)])
    with pytest.raises(ConfigError, match=r"1 torch schedulers, but the checkpoint .* with 0"):
        Rates(other, None, [StepLR(other, 1)]).load_state_dict({"last_epoch": 3})


def test_two_that_set_them_are_rejected() -> None:
    before, after = sgd(), sgd()
    LambdaLR(before, halved)
    with pytest.raises(ConfigError, match=r"has a torch LR scheduler; one of them must set .* Run"):
        Rates(before, halved)
    rates = Rates(after, lambda step: 1.0)
    late = LambdaLR(after, halved)
    with pytest.raises(ConfigError, match=r"set the learning rate of a group to one of \[0.15\]"):
        train(after, rates, late.step)
