"""Averaged updates with error feedback: nothing is lost, and Algorithm as written down."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tests.gradcomp.replicas import Replicas, all_of, flat
from thinpipe.gradcomp.agreement import Agreement
from thinpipe.gradcomp.methods.ef_updates import Config
from thinpipe.gradcomp.registry import parse_options
from thinpipe.pipeline.wire.sign_mean import SignMean

NOW: dict[str, Any] = {"subset": 0.5, "delayed": False}


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> float:
    """What moves count in these tests, whatever gradients agree on."""

    def gains(agreement: Agreement, power: float) -> dict[nn.Parameter, Tensor]:
        return {parameter: torch.tensor(1.7) for parameter in agreement._parameters}

    monkeypatch.setattr(Agreement, "gains", gains)
    return 1.7


def part(replicas: Replicas, key: str) -> list[Tensor]:
    """What each replica keeps under a name (one bucket), as it is now."""
    return [sync.state_dict()[key][0].clone() for sync in replicas.syncs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_lost(dtype: torch.dtype, gain: float) -> None:
    """g + mean(r) + e moves by `gain` times the mean of the local moves."""
    replicas = Replicas(3, "ef_updates", NOW, dtype=dtype)
    start, moved = flat(replicas.nets[0]), torch.zeros(53)
    for _ in range(20):
        replicas.backward()
        all_of(replicas.syncs, lambda sync: sync.before_step())
        before = torch.stack(replicas.parameters())
        replicas.optimize()
        moved += gain * (torch.stack(replicas.parameters()) - before).mean(0)
        all_of(replicas.syncs, lambda sync: sync.after_step())
        owed, errors = torch.stack(part(replicas, "left")), torch.cat(part(replicas, "error"))
        held = part(replicas, "global")[0] + owed.mean(0) + errors
        torch.testing.assert_close(held, start + moved, rtol=0, atol=1e-5)
    assert owed.abs().max() > 0
    assert errors.abs().max() > 0


@pytest.mark.parametrize("steps", [2, 3])
def test_parameters_have_half_of_what_is_not_sent_and_the_newest_move(steps: int) -> None:
    """Those whose turn it is, every other step here, follow what was exchanged at once."""
    replicas = Replicas(2, "ef_updates", NOW)
    for _ in range(steps):
        replicas.step()
    old = part(replicas, "left")
    replicas.backward()
    all_of(replicas.syncs, lambda sync: sync.before_step())
    (g, _), before = part(replicas, "global"), replicas.parameters()
    for found, owed in zip(before, old, strict=True):
        torch.testing.assert_close(found, g + 0.5 * owed, rtol=0, atol=1e-6)
    replicas.optimize()
    moved = replicas.parameters()
    all_of(replicas.syncs, lambda sync: sync.after_step())
    (new_g, _), left = part(replicas, "global"), part(replicas, "left")
    assert torch.equal(new_g, g) == (steps == 3)
    for found, x, owed in zip(replicas.parameters(), moved, left, strict=True):
        expected = x if steps == 3 else new_g + 0.5 * owed
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 4])
def test_the_global_copy_is_the_same_everywhere_after_every_step(bits: int) -> None:
    replicas = Replicas(3, "ef_updates", {"subset": 0.5, "bits": bits, "bucket_mb": 1e-4})
    seen = []
    for _ in range(6):
        replicas.step()
        first, *others = replicas.global_parameters()
        assert all(torch.equal(first, other) for other in others)
        seen.append(first)
    assert not torch.equal(seen[0], seen[-1])


def test_one_replica_is_left_alone() -> None:
    replicas, plain = Replicas(1, "ef_updates", {}), Replicas(1, "allreduce", {})
    for _ in range(3):
        replicas.step()
        plain.step()
    assert torch.equal(replicas.parameters()[0], plain.parameters()[0])


def test_the_first_exchange_by_hand(gain: float) -> None:
    """All parameters at once: signs of each replica's move, and signs of their mean."""
    replicas = Replicas(2, "ef_updates", {**NOW, "subset": 1.0})
    replicas.backward()
    all_of(replicas.syncs, lambda sync: sync.before_step())
    before = flat(replicas.nets[0])
    replicas.optimize()
    moves = [gain * (x - before) for x in replicas.parameters()]
    all_of(replicas.syncs, lambda sync: sync.after_step())
    expected = []
    for server in range(2):
        parts = [move.tensor_split(2)[server] for move in moves]
        expected.append(coded((coded(parts[0]) + coded(parts[1])) / 2))
    found = replicas.global_parameters()[0]
    torch.testing.assert_close(found, before + torch.cat(expected), rtol=0, atol=1e-6)


def coded(x: Tensor) -> Tensor:
    codec, seen = SignMean(128), torch.empty(1, x.numel())
    codec.encode(x[None], torch.empty(1, codec.capacity(x.numel()), dtype=torch.uint8), seen)
    return seen[0]


def test_the_default_sends_two_hundred_times_less_than_a_ring() -> None:
    config = Config()
    (bits,) = [cost for sent, cost in config.ladder if sent == {"subset": 0.125, "bits": 1}]
    assert (config.subset, config.bits) == (0.125, 1)
    assert 32 / bits > 200
    assert bits == pytest.approx(0.125 * 1.125)
    costs = [cost for _, cost in config.ladder]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"bits": 16}, "less than or equal to 8"),
        ({"subset": 2**-0.5}, "ratio"),
    ],
)
def test_impossible_settings_are_rejected(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValidationError, match=reported):
        parse_options("ef_updates", options)
