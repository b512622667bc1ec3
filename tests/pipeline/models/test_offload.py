"""An optimizer that steps over a few parameters at a time takes the steps it takes over all."""

from collections.abc import Callable
from typing import Any

import optimi
import pytest
import torch
from torch import nn

from thinpipe.pipeline.models import offload


class CountsByGroup(torch.optim.Optimizer):
    """Steps get shorter; how many there were stands in the group, as many optimizers have it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter -= group["lr"] / group["step"] * parameter.grad


MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=0.1),
    "two groups": lambda own: torch.optim.AdamW(
        [{"params": own[:2], "lr": 0.1}, {"params": own[2:], "lr": 0.01}]
    ),
    "compensated": lambda own: optimi.AdamW(own, lr=0.1, kahan_sum=True),
    "counts by group": CountsByGroup,
}


@pytest.mark.parametrize("name", MAKERS)
def test_parts_take_the_steps_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_AT_ONCE", 100)
    dtype = torch.bfloat16 if name == "compensated" else torch.float32
    start = [torch.randn(90, dtype=dtype) for _ in range(5)]
    found = []
    for in_ram in (False, True):
        own = [nn.Parameter(values.clone()) for values in start]
        optimizer = MAKERS[name](own)
        step = offload.StateInRam(optimizer, torch.device("cpu")).step if in_ram else optimizer.step
        generator = torch.Generator().manual_seed(1)
        for number in range(4):
            for group in optimizer.param_groups:
                group["lr"] /= 1 + number
            for parameter in own:
                noise = torch.randn(90, generator=generator)
                parameter.grad = noise.to(dtype)
            step()
        settings = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        found.append((own, settings))
    (whole, expected), (parts, settings) = found
    assert settings == expected
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
