"""A stage held by several ranks, against FSDP2 with torch's own collectives.

One group of processes of each size trains in all ways; tests look at what it found.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.training import TORCH_2_13
from thinpipe.gradcomp.sharded.collectives import sent_nbytes, units_of
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.stage import ShardedStage, StageShards
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.models.transformer import TransformerConfig, TransformerStage, build_layers
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES

pytestmark = [pytest.mark.dist, TORCH_2_13]

MODEL = TransformerConfig(layers=2, width=16, heads=2, vocab=33, context=8)
GATHERS = ["step", "microbatch"]
EXACT = ShardsConfig(method="qsdp", weight_bits=32, gradient_bits=32)
W8G8 = ShardsConfig(method="qsdp", keep_below=64, bucket=64)
LEARNED = ShardsConfig(
    method="qsdp", weight_bits=6, gradient_bits=4, weight_rounding="learned", keep_below=64
)
SITES = W8G8.model_copy(update={"ranks_per_site": 2})
W3 = ShardsConfig(method="qsdp", weight_bits=3, gradient_bits=32, keep_below=64, bucket=64)
W3_DIFFERENCES = W3.model_copy(update={"weights": "differences"})
STEPS = 4


def two_at_once(rank: int) -> dict[str, Any]:
    ways = {"exact": EXACT, "W8G8": W8G8, "learned": LEARNED}
    found = {name: train(rank, config) for name, config in ways.items()}
    found |= {"values": remember(rank, W3), "differences": remember(rank, W3_DIFFERENCES)}
    return found | {"torch": train_with_torch(rank), "orders": _orders(rank)}


def three_at_once(rank: int) -> dict[str, Any]:
    ways = {gather: W8G8.model_copy(update={"gather": gather}) for gather in GATHERS}
    found = {gather: train(rank, config, 2) for gather, config in ways.items()}
    return found | {"differences": remember(rank, W3_DIFFERENCES)}


def four_at_once(rank: int) -> dict[str, Any]:
    return {"sites": train(rank, SITES), "exact": train(rank, EXACT)}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(2, two_at_once)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(3, three_at_once)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(4, four_at_once)


def model() -> TransformerStage:
    return build_layers(MODEL, 0, MODEL.layers, seed=3, device="cpu")


def make(config: ShardsConfig) -> tuple[ShardedStage, StageShards]:
    transport = GlooTransport(1, 1, timeout_s=60, shards=dist.get_world_size())
    whole = model()
    stage = ShardedStage(whole, whole.parts(), transport.shard_group)
    peers = transport.peers("shards", "stage 0 shard")
    return stage, StageShards([stage], peers, config, seed=transport.mesh.rank)


def loss_of(run: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(MODEL.vocab, (4, 8), generator=generator)
    logits: Tensor = run(tokens, None)
    return logits.flatten(0, 1).logsumexp(1).sub(logits.flatten(0, 1)[:, 0]).mean()


def train(
    rank: int,
    config: ShardsConfig,
    backwards: int = 1,
    *,
    lr: float = 1e-2,
    evaluated: int | None = None,
) -> dict[str, Any]:
    """What there was in every step; `used` are a weight's values as they were computed with."""
    stage, shards = make(config)
    used: list[Tensor] = []
    first = stage.inner.parts()[0].attn.qkv
    first.register_forward_pre_hook(lambda m, _: used.append(m.weight.detach().clone()))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=lr)
    losses, remembered, owned, sent = [], [], [], [(0, 0)]
    for step in range(STEPS):
        owned.append(stage.get_parameter("blocks.0.attn.qkv.weight").detach().clone())
        shards.begin_step(step, backwards)
        for number in range(backwards):
            loss = loss_of(stage, rank, step + number)
            loss.backward()  # type: ignore[no-untyped-call]
        shards.before_step()
        remembered.append([tensor.clone() for tensor in shards.remembered])
        losses.append(loss.item())
        sent.append((shards.weight_bytes, shards.gradient_bytes))
        optimizer.step()
        optimizer.zero_grad()
        if step == evaluated:
            with shards.evaluating(), torch.no_grad():
                loss_of(stage, rank, 0)
    weights = {name: p.detach() for name, p in stage.named_parameters()}
    found = {"losses": losses, "used": used, "weights": weights, "sent": sent}
    return {**found, "remembered": remembered, "owned": owned}


def remember(rank: int, config: ShardsConfig) -> dict[str, Any]:
    return train(rank, config, lr=1e-3, evaluated=2)


def train_with_torch(rank: int) -> Any:
    whole = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*whole.parts(), whole):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator, union-attr]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator, union-attr]
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(whole, rank, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: local(p) for name, p in whole.named_parameters()}


def local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def test_32_bits_are_fsdp2_bit_for_bit(two: list[dict[str, Any]]) -> None:
    for one in two:
        exact, (losses, reference) = one["exact"], one["torch"]
        assert exact["losses"] == losses
        assert exact["weights"].keys() == reference.keys()
        for name, weight in exact["weights"].items():
            assert torch.equal(weight, reference[name]), name


@pytest.mark.parametrize("gather", GATHERS)
def test_all_gather_the_same_weights_and_none_is_exact(
    three: list[dict[str, Any]], gather: str
) -> None:
    gathered, *others = (one[gather]["used"] for one in three)
    for step in range(STEPS):
        first, second = gathered[2 * step : 2 * step + 2]
        assert torch.equal(first, second)  # rounded alike in all of a step
    for other in others:
        assert all(map(torch.equal, gathered, other))
    whole = model().blocks["0"].attn.qkv.weight.detach()  # type: ignore[union-attr]
    span = float(whole.max() - whole.min())
    for part, exact in zip(gathered[0].chunk(3), whole.chunk(3), strict=True):
        assert not torch.equal(part, exact)  # the owner's part included
        assert float((part - exact).abs().max()) <= 0.51 * span / 255


def test_bytes_are_those_of_the_formula(two: list[dict[str, Any]]) -> None:
    sent = two[0]["W8G8"]["sent"][1]
    exchanges = 3  # two blocks and the rest
    weight = gradient = exchanges * EXCHANGE_HEADER_NBYTES
    for parameter in model().parameters():
        numel = -(-parameter.shape[0] // 2) * parameter.shape[1:].numel()
        buckets = -(-numel // 64)
        kept = parameter.dim() < 2
        weight += 4 * numel if kept else 8 * buckets + 8 * -(-numel // 8)
        gradient += 4 * numel if kept else 4 * buckets + 8 * -(-numel // 8)
    assert sent == (weight, gradient)
    whole = model()
    assert sent_nbytes(units_of(whole, whole.parts()), W8G8, 2) == sent


def test_sites_compute_alike_and_send_fewer_bytes_to_each_other(four: list[dict[str, Any]]) -> None:
    sent, gathered = four[0]["sites"]["sent"][1], four[0]["sites"]["used"]
    for one in four:
        assert all(map(torch.equal, gathered, one["sites"]["used"]))
        losses, exact = one["sites"]["losses"], one["exact"]["losses"]
        assert losses != exact
        assert losses == pytest.approx(exact, abs=0.02)
    whole = model()
    assert sent == sent_nbytes(units_of(whole, whole.parts()), SITES, 4)
    flat = sent_nbytes(units_of(whole, whole.parts()), W8G8, 4)
    assert flat == (3 * sent[0], 3 * sent[1])  # to all, where the other site alone gets it once


def test_learned_levels_and_few_bits_train(two: list[dict[str, Any]]) -> None:
    losses, exact = two[0]["learned"]["losses"], two[0]["exact"]["losses"]
    assert losses != exact
    assert losses == pytest.approx(exact, abs=0.05)


def test_ranks_remember_the_same_and_compute_with_it(three: list[dict[str, Any]]) -> None:
    first, *others = (one["differences"] for one in three)
    quantized = sum(parameter.dim() > 1 for parameter in model().parameters())
    used = first["used"]
    evaluated = used.pop(3)
    for step, tensors in enumerate(first["remembered"]):
        assert len(tensors) == quantized
        assert any(torch.equal(used[step].flatten(), tensor.flatten()) for tensor in tensors)
        for other in others:
            assert all(map(torch.equal, tensors, other["remembered"][step]))
    owned = torch.cat([one["differences"]["owned"][3] for one in three])
    assert torch.equal(evaluated, owned)  # exactly what is kept


def test_the_error_is_that_of_one_difference(two: list[dict[str, Any]]) -> None:
    errors, sent = {}, {}
    for kind in ("differences", "values"):
        used = two[0][kind]["used"]
        del used[3]  # of the evaluation
        whole = [
            torch.cat(parts) for parts in zip(*(one[kind]["owned"] for one in two), strict=True)
        ]
        errors[kind] = [float((a - b).abs().max()) for a, b in zip(used, whole, strict=True)]
        sent[kind] = [weights for weights, _ in two[0][kind]["sent"]]
    assert errors["differences"][0] == 0.0  # sent exactly, as nothing is remembered
    moves = 2 * 1e-3  # of AdamW in a step, and what the last one left
    assert 0 < max(errors["differences"][1:]) <= moves
    assert max(errors["differences"]) < 0.1 * min(errors["values"])
    some, plain = sent["differences"], sent["values"]
    assert some[2] - some[1] == plain[2] - plain[1]
    assert some[1] > 2 * plain[1]


def _until_killed(rank: int, said: Path) -> None:
    stage, shards = make(EXACT)
    shards.begin_step(0, 1)
    if rank == 1:
        loss_of(stage, rank, 0)
        os._exit(9)
    try:
        loss_of(stage, rank, 0).backward()  # type: ignore[no-untyped-call]
        shards.before_step()
    except TransportError as error:
        said.write_text(str(error), encoding="utf-8")


def test_a_killed_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(2, _until_killed, tmp_path / "said")
    assert "stage 0 shard 1" in (tmp_path / "said").read_text(encoding="utf-8")


def _orders(rank: int) -> list[tuple[list[str], list[str]]]:
    stage, _ = make(EXACT)
    state: Any = fully_shard.state  # type: ignore[attr-defined]
    found = []
    for module, own, _ in stage.groups:
        (group,) = state(module)._fsdp_param_groups
        ours = [parameter.data_ptr() for parameter in own]
        theirs = [p.sharded_param.to_local().data_ptr() for p in group.fsdp_params]
        found.append((ours, theirs))
    return found


def test_units_are_in_the_order_of_fsdp2(two: list[dict[str, Any]]) -> None:
    for ours, theirs in two[0]["orders"]:
        assert ours == theirs
