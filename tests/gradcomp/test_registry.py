"""Methods are found by their files' names, with what else the files hold."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from thinpipe.gradcomp import methods
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import build_optimizer, load_method, parse_options
from thinpipe.pipeline.replica_sync import ReplicaSync

MOMENTUM = """
import torch
from pydantic import BaseModel

class Config(BaseModel):
    momentum: float = 0.9

def optimizer(config, parameters, train, sync):
    return torch.optim.SGD(parameters, lr=train.lr, momentum=config.momentum)
"""


@dataclass(frozen=True)
class Train:
    lr: float = 0.5
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a method that is there during the test."""
    (tmp_path / "momentum.py").write_text(MOMENTUM)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    yield "momentum"
    sys.modules.pop(f"{methods.__name__}.momentum")
    del methods.momentum  # type: ignore[attr-defined]


def test_an_unknown_method_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="allreduce, async_average, bytegrad"):
        load_method("allredcue")


def test_a_method_may_bring_its_optimizer(added: str) -> None:
    weight = nn.Parameter(torch.zeros(2))
    options = parse_options(added, {"momentum": 0.5})
    optimizer = build_optimizer(added, options, [weight], Train(), _sync(weight))
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["params"]) == (0.5, 0.5, [weight])


def _sync(weight: nn.Parameter) -> ReplicaSync:
    (peers,) = local_peers(1)
    return load_method("none").build(parse_options("none", {}), [weight], peers)
