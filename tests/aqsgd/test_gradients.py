"""AQ-SGD on gradients: both ends cache a sample's own gradient, whatever batch it came in."""

import random
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.training import TOKENS, WIDTH, batch, config, share, start
from thinpipe.aqsgd.config import GradientAqsgdConfig, build_delta
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.wire.header import HEADER_NBYTES

EXACT: Any = [
    {
        "forward": {"kind": "raw"},
        "backward": {"kind": "aqsgd", "bits": 8, "memory": "fp32", "first_visit": "fp32"},
    }
]
BOTH: Any = [
    {
        "forward": {"kind": "aqsgd", "bits": 4, "rate": 0.6, "coding": "zstd"},
        "backward": {"kind": "aqsgd", "bits": 4, "rate": 0.5, "coding": "zstd"},
    }
]
EPOCH = [batch([0, 1, 2, 3, 4, 5, 6, 7]), batch([8, 9, 10, 11])]
OTHERWISE = [batch([3, 8, 0, 11]), batch([1, 2, 4, 5, 6, 7, 9, 10])]


def memory_of(built: Any, cut: int) -> Any:
    (memory,) = {
        id(channel.codec.memory): channel.codec.memory
        for channel in built.engine.channels
        if channel.codec.cut == cut and channel.codec.direction == 1
    }.values()
    return memory


def padded(whole: Batch, sample: int, tokens: int) -> Batch:
    """The batch with that many targets of one sample left out."""
    targets = whole.targets.clone()
    targets[whole.ids_B == sample, -tokens:] = -100
    return Batch(whole.inputs_BT, targets, whole.ids_B)


def remembered(rank: int, run: Any, epochs: list[list[Batch]]) -> list[dict[int, torch.Tensor]]:
    """After each epoch, every sample's gradient as this rank caches it."""
    built, found, step = start(run), [], 0
    replica, replicas = rank // run.pipeline.pipeline_ranks, run.pipeline.replicas
    for epoch in epochs:
        for whole in epoch:
            assert not built.engine.train_step(share(whole, replica, replicas), step).skipped
            step += 1
        memory = memory_of(built, 2)
        held = sorted(memory._histories)
        rows = memory.read(torch.tensor(held), TOKENS * WIDTH)
        found.append(dict(zip(held, rows, strict=True)))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 1), (1, 2), (2, 1)])
def test_what_depends_on_the_batch_is_divided_out(
    ranks: Ranks, replicas: int, accumulate: int
) -> None:
    """Weights hardly move; losses are divided by other numbers of tokens in every step."""
    run = config(
        pipeline={"microbatches": 2, "replicas": replicas},
        boundary=EXACT,
        train={"batch_size": 8, "lr": 1e-30, "weight_decay": 0.0, "accumulate": accumulate},
    )
    epochs = [EPOCH, EPOCH[::-1], EPOCH]
    if replicas == 1:  # samples keep to their replica
        epochs.append(OTHERWISE)
    epochs = [[padded(whole, 5, 7) for whole in epoch] for epoch in epochs]
    alone = ranks(2, remembered, run.model_copy(update={"pipeline": _single(run)}), [EPOCH])
    for found in ranks(2 * replicas, remembered, run, epochs):
        first = found[0]
        for later in found[1:]:
            for sample, gradient_N in later.items():
                torch.testing.assert_close(gradient_N, first[sample], rtol=1e-4, atol=1e-6)
        for sample in first.keys() - {5}:
            torch.testing.assert_close(first[sample], alone[0][0][sample], rtol=1e-4, atol=1e-6)


def _single(run: Any) -> Any:
    return run.pipeline.model_copy(update={"replicas": 1})


def train_and_digest(rank: int, run: Any) -> list[dict[str, str]]:
    built, found = start(run), []
    replica = rank // run.pipeline.pipeline_ranks
    for step, whole in enumerate((*EPOCH, *EPOCH, *EPOCH)):
        built.engine.train_step(share(whole, replica, run.pipeline.replicas), step)
        memories: Any = {c.codec.name: c.codec.memory for c in built.engine.channels}
        found.append({name: memory.digest() for name, memory in memories.items()})
    return found


@pytest.mark.dist
def test_both_ends_remember_the_same_bits_in_both_directions(ranks: Ranks) -> None:
    run = config(
        pipeline={"cuts": [1, 3], "schedule": "1F1B", "replicas": 2},
        boundary=BOTH,
    )
    everyone = ranks(6, train_and_digest, run)
    for step in range(6):
        for replica in (0, 3):
            ends = [everyone[replica + stage][step] for stage in range(3)]
            for cut, upper in ((1, 0), (3, 1)):
                for way in ("forward", "backward"):
                    name = f"cut {cut} {way}"
                    assert ends[upper][name] == ends[upper + 1][name]
                assert ends[upper][f"cut {cut} forward"] != ends[upper][f"cut {cut} backward"]


@pytest.mark.parametrize("delta", ["uniform", "tiles"])
def test_first_visits_cost_what_changes_cost(delta: Any) -> None:
    spec = GradientAqsgdConfig(bits=4, delta=delta)
    boundary = build_delta(spec, width=16, key=0)
    shape = torch.Size((2, 8, 64))
    plan = boundary.plan(torch.tensor([1, 2]), shape, step=0)
    wire = torch.empty(plan.capacity, dtype=torch.uint8)
    boundary.encode(plan, torch.randn(shape), wire)
    boundary.finish_step(keep=True)
    assert boundary.plan(torch.tensor([1, 2]), shape, step=1).capacity == plan.capacity


def test_both_ends_remember_what_the_receiver_decoded() -> None:
    spec, dice = GradientAqsgdConfig(bits=4), random.Random(0)
    ends = [build_delta(spec, width=16, key=0) for _ in range(2)]
    for step in range(6):
        ids_B = torch.tensor(dice.sample(range(8), 4))
        x_BTD = torch.randn(4, 8, 16)
        plans = [end.plan(ids_B, x_BTD.shape, step=step) for end in ends]
        wire, out_BTD = torch.empty(plans[0].capacity, dtype=torch.uint8), torch.empty_like(x_BTD)
        ends[0].encode(plans[0], x_BTD, wire)
        ends[1].decode(plans[1], wire, out_BTD)
        for end in ends:
            end.finish_step(keep=True)
        assert ends[0].memory.digest() == ends[1].memory.digest()
        kept_BN = ends[1].memory.read(ids_B, 8 * 16)
        torch.testing.assert_close(kept_BN, out_BTD.flatten(1), rtol=2**-8, atol=1e-6)


def backward_bytes(rank: int, run: Any) -> list[int]:
    built = start(run)
    sent = []
    for step, whole in enumerate((*EPOCH, *EPOCH)):
        totals = built.engine.train_step(whole, step)
        sent.append(sum(wire.nbytes for wire in totals.wire if wire.direction == "backward"))
    return sent


@pytest.mark.dist
def test_bytes_of_every_visit_are_those_of_the_codec(ranks: Ranks) -> None:
    backward = {"kind": "aqsgd", "bits": 4, "delta": "uniform"}
    boundary: Any = [{"forward": {"kind": "raw"}, "backward": backward}]
    run = config(pipeline={"cuts": [2]}, boundary=boundary)
    sample = 4 * TOKENS * WIDTH // 8 + 2 * TOKENS
    for sent in ranks(2, backward_bytes, run):
        assert sent == [4 * HEADER_NBYTES + n * sample for n in (8, 4, 8, 4)]
