"""What every method in gradcomp/methods must keep: replicas, honest bytes, exact resume."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from tests.ranks import Ranks
from thinpipe.gradcomp.peers import GroupPeers
from thinpipe.gradcomp.registry import load_method, method_names, parse_options

pytestmark = pytest.mark.dist

OPTIONS: dict[str, dict[str, Any]] = {  # several buckets
    name: {"bucket_mb": 1e-4} for name in method_names() if name != "none"
}


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)


def steps(
    rank: int, name: str, count: int, stop_at: int | None, device: str = "cpu"
) -> tuple[Any, ...]:
    """Train on data of one's own; at `stop_at`, go on from saved state in new objects."""
    net = model(device)
    optimizer, sync = _optimizer(net), _sync(net, name)
    for step in range(count):
        if step == stop_at:
            weights, moments, state = net.state_dict(), optimizer.state_dict(), sync.state_dict()
            net = model(device)
            net.load_state_dict(weights)
            optimizer, sync = _optimizer(net), _sync(net, name)
            optimizer.load_state_dict(moments)
            sync.load_state_dict(state)
        sync.begin_step(1)
        generator = torch.Generator().manual_seed(100 * step + rank)
        net(torch.randn(4, 6, generator=generator).to(device)).square().sum().backward()
        sync.before_step()
        optimizer.step()
        sync.after_step()
        optimizer.zero_grad()
    found = {key: value.detach().cpu() for key, value in net.state_dict().items()}
    return found, sync.bytes_sent, sync.replicas_equal


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def _sync(net: nn.Module, name: str) -> Any:
    assert dist.group.WORLD is not None
    return load_method(name).build(
        parse_options(name, OPTIONS.get(name, {})),
        list(net.parameters()),
        GroupPeers((dist.group.WORLD, dist.group.WORLD), chunk_nbytes=64),
    )


@pytest.mark.parametrize("name", method_names())
def test_replicas_are_equal_when_the_method_says_so(ranks: Ranks, name: str) -> None:
    (first, _, claims_equal), (second, _, _), _ = ranks(3, steps, name, 3, None)
    equal = all(torch.equal(first[key], second[key]) for key in first)
    assert equal == claims_equal == load_method(name).REPLICAS_EQUAL


@pytest.mark.parametrize("name", method_names())
def test_resume_is_bit_exact(ranks: Ranks, name: str) -> None:
    whole = ranks(2, steps, name, 4, None)
    resumed = ranks(2, steps, name, 4, 2)
    for (expected, _, _), (found, _, _) in zip(whole, resumed, strict=True):
        for key, weight in expected.items():
            assert torch.equal(weight, found[key]), key


@pytest.mark.parametrize("name", method_names())
def test_a_single_replica_sends_nothing(ranks: Ranks, name: str) -> None:
    ((_, nbytes, _),) = ranks(1, steps, name, 2, None)
    assert nbytes == 0


@pytest.mark.parametrize("name", method_names())
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        parse_options(name, {"no_such_option": 1})


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="allreduce, cocktail, none"):
        load_method("allredcue")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", method_names())
def test_replicas_on_a_gpu_agree_and_resume(ranks: Ranks, name: str) -> None:
    whole = ranks(2, steps, name, 4, None, "cuda")
    resumed = ranks(2, steps, name, 4, 2, "cuda")
    for (expected, _, _), (found, _, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(weight, found[key]) for key, weight in expected.items())
    (first, _, claims_equal), (second, _, _) = whole
    assert all(torch.equal(first[key], second[key]) for key in first) == claims_equal
