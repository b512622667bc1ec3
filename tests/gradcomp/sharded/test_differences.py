"""Weights sent as differences: what ranks remember is equal, and errors do not add up."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gradcomp.sharded.test_stage import loss_of, make, model
from tests.ranks import Ranks
from tests.training import TORCH_2_13
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.differences import Remembered
from thinpipe.gradcomp.sharded.qsdp import value_codec
from thinpipe.pipeline.wire.codec import Noise

W3: dict[str, Any] = {
    "method": "qsdp",
    "weight_bits": 3,
    "gradient_bits": 32,
    "keep_below": 64,
    "bucket": 64,
}
STEPS = 6


def train(rank: int, config: ShardsConfig) -> Any:
    stage, shards = make(config)
    weight = "blocks.0.attn.qkv.weight"
    used: list[Tensor] = []
    first = stage.inner.parts()[0].attn.qkv
    first.register_forward_pre_hook(lambda m, _: used.append(m.weight.detach().clone()))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    losses, remembered, owned, sent = [], [], [], [0]
    for step in range(STEPS):
        owned.append(stage.get_parameter(weight).detach().clone())
        shards.begin_step(step, 1)
        loss = loss_of(stage, rank, step)
        loss.backward()  # type: ignore[no-untyped-call]
        shards.before_step()
        remembered.append([tensor.clone() for tensor in shards.remembered])
        losses.append(loss.item())
        sent.append(shards.weight_bytes)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with shards.evaluating(), torch.no_grad():
                loss_of(stage, rank, 0)
    return losses, remembered, used, owned, sent


@pytest.mark.dist
@TORCH_2_13
def test_ranks_remember_the_same_and_compute_with_it(ranks: Ranks) -> None:
    first, *others = ranks(3, train, ShardsConfig(**W3, weights="differences"))
    _, remembered, used, *_ = first
    quantized = sum(parameter.dim() > 1 for parameter in model().parameters())
    evaluated = used.pop(3)
    for step, tensors in enumerate(remembered):
        assert len(tensors) == quantized
        assert any(torch.equal(used[step].flatten(), tensor.flatten()) for tensor in tensors)
        for _, theirs, *_ in others:
            assert all(map(torch.equal, tensors, theirs[step]))
    owned = torch.cat([found[3][3] for found in (first, *others)])
    assert torch.equal(evaluated, owned)  # exactly what is kept


@pytest.mark.dist
@TORCH_2_13
def test_the_error_is_that_of_one_difference(ranks: Ranks) -> None:
    results = ranks(2, train, ShardsConfig(**W3, weights="differences"))
    values = ranks(2, train, ShardsConfig(**W3))
    errors: dict[str, list[float]] = {}
    for kind, found in (("differences", results), ("values", values)):
        _, _, used, *_ = found[0]
        del used[3]  # of the evaluation
        whole = [torch.cat([result[3][step] for result in found]) for step in range(STEPS)]
        errors[kind] = [float((a - b).abs().max()) for a, b in zip(used, whole, strict=True)]
    assert errors["differences"][0] == 0.0  # sent exactly, as nothing is remembered
    moves = 2 * 1e-3  # of AdamW in a step, and what the last one left
    assert 0 < max(errors["differences"][1:]) <= moves
    assert max(errors["differences"]) < 0.1 * min(errors["values"])
    sent, plain = results[0][4], values[0][4]
    assert sent[2] - sent[1] == plain[2] - plain[1]
    assert sent[1] > 2 * plain[1]


def test_a_value_that_rests_is_remembered_exactly_in_the_end() -> None:
    """Three ranks, in this process; parts of 100 values, of which the second are not remembered."""
    codec, sizes = value_codec(2, "shift", 50), [100, 7]
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(3 * size, generator=generator) for size in sizes]
    memory = Remembered(sizes, [0], 3)
    assert memory.empty
    memory.add([torch.zeros(107) for _ in range(3)])
    errors = []
    for step in range(12):
        parts = [torch.cat([tensor.view(3, -1)[rank] for tensor in whole]) for rank in range(3)]
        for rank, part in enumerate(parts):
            memory.subtract(part, rank)
            wire = torch.zeros(1, codec.capacity(100), dtype=torch.uint8)
            row = part[None, :100]
            codec.encode(row, wire, row, noise=Noise(1, step, torch.tensor([rank])))
        memory.add(parts)
        gathered = torch.cat([part[:100] for part in parts])
        assert all(torch.equal(part[100:], whole[1].view(3, -1)[r]) for r, part in enumerate(parts))
        errors.append(float((gathered - whole[0]).abs().max()))
    assert all(b < 0.75 * a for a, b in pairwise(errors))
    assert errors[-1] < 1e-3 * errors[0]


def test_rows_of_all_ranks_make_the_memory_whole_again() -> None:
    memory = Remembered([4, 2, 3], [0, 2], 2)
    memory.add([torch.arange(9.0), -torch.arange(9.0)])
    again = [Remembered([4, 2, 3], [0, 2], 2) for _ in range(2)]
    for rank, one in enumerate(again):
        one.load_state_dict(memory.state_dict(rank))
        assert not one.empty
        assert one.state_dict(rank).keys() == memory.state_dict(rank).keys()
    rows = [one.row_parts(rank)[rank] for rank, one in enumerate(again)]
    for one in again:
        one.keep_parts(rows)
        assert all(map(torch.equal, one.tensors, memory.tensors))
    fresh = Remembered([4, 2, 3], [0, 2], 2)
    fresh.load_state_dict({})
    assert fresh.empty
