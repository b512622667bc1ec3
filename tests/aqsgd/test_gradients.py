"""AQ-SGD on gradients: both ends cache a sample's own gradient, whatever batch it came in."""

import random
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
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
        "forward": {"kind": "aqsgd", "bits": 3},
        "backward": {"kind": "aqsgd", "bits": 4, "delta": "uniform"},
    }
]
EPOCH = [batch([0, 1, 2, 3, 4, 5, 6, 7]), batch([8, 9, 10, 11])]
OTHERWISE = [batch([3, 8, 0, 11]), batch([1, 2, 4, 5, 6, 7, 9, 10])]


def memory_of(built: Any, cut: int) -> Any:
    """That of gradients at one end."""
    ends = [channel.codec for channel in built.engine.channels]
    return next(end.memory for end in ends if (end.cut, end.direction) == (cut, 1))


def padded(whole: Batch, sample: int, tokens: int) -> Batch:
    """The batch with that many targets of one sample left out."""
    targets = whole.targets.clone()
    targets[whole.ids_B == sample, -tokens:] = -100
    return Batch(whole.inputs_BT, targets, whole.ids_B)


Remembered = list[dict[int, torch.Tensor]]
"""After each epoch, every sample's gradient as a rank caches it."""


def on_a_rank(rank: int, run: Any, epochs: list[list[Batch]]) -> Remembered:
    return remembered(start(run), rank // run.pipeline.pipeline_ranks, run, epochs)


def alone(run: Any, epochs: list[list[Batch]]) -> Remembered:
    with in_process(run, total_steps=100) as built:
        return remembered(built, 0, run, epochs)


def remembered(built: Any, replica: int, run: Any, epochs: list[list[Batch]]) -> Remembered:
    found, step, replicas = [], 0, run.pipeline.replicas
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
    single = run.pipeline.model_copy(update={"replicas": 1})
    (expected,) = alone(run.model_copy(update={"pipeline": single}), [EPOCH])
    several = ranks(4, on_a_rank, run, epochs) if replicas == 2 else [alone(run, epochs)]
    for found in several:
        first = found[0]
        for later in found[1:]:
            for sample, gradient_N in later.items():
                torch.testing.assert_close(gradient_N, first[sample], rtol=1e-4, atol=1e-6)
        for sample in first.keys() - {5}:
            torch.testing.assert_close(first[sample], expected[sample], rtol=1e-4, atol=1e-6)


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
        pipeline={"cuts": [2], "schedule": "1F1B", "replicas": 2},
        boundary=BOTH,
    )
    everyone = ranks(4, train_and_digest, run)
    for step in range(6):
        for replica in (0, 2):
            upper, lower = (everyone[replica + stage][step] for stage in range(2))
            assert upper == lower
            assert upper["cut 2 forward"] != upper["cut 2 backward"]


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


def test_bytes_of_every_visit_are_those_of_the_codec() -> None:
    backward = {"kind": "aqsgd", "bits": 4, "delta": "uniform"}
    boundary: Any = [{"forward": {"kind": "raw"}, "backward": backward}]
    run = config(pipeline={"cuts": [2]}, boundary=boundary)
    sample = 4 * TOKENS * WIDTH // 8 + 2 * TOKENS
    with in_process(run, total_steps=4) as built:
        steps = [built.engine.train_step(item, n) for n, item in enumerate((*EPOCH, *EPOCH))]
    sent = [wire.nbytes for totals in steps for wire in totals.wire if wire.direction == "backward"]
    assert sent == [4 * HEADER_NBYTES + n * sample for n in (8, 4, 8, 4)]
