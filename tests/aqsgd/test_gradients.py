"""AQ-SGD on gradients: both ends cache a sample's own gradient, whatever batch it came in."""

from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import run_ranks
from tests.training import TOKENS, WIDTH, batch, config, share, start
from thinpipe.pipeline.batch import Batch

EXACT: Any = [
    {
        "forward": {"kind": "raw"},
        "backward": {"kind": "aqsgd", "bits": 8, "memory": "fp32", "first_visit": "fp32"},
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
def test_what_depends_on_the_batch_is_divided_out(replicas: int, accumulate: int) -> None:
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
    several = run_ranks(4, on_a_rank, run, epochs) if replicas == 2 else [alone(run, epochs)]
    for found in several:
        first = found[0]
        for later in found[1:]:
            for sample, gradient_N in later.items():
                torch.testing.assert_close(gradient_N, first[sample], rtol=1e-4, atol=1e-6)
        for sample in first.keys() - {5}:
            torch.testing.assert_close(first[sample], expected[sample], rtol=1e-4, atol=1e-6)
    if replicas == 2:  # the two ends of the cut, to the bit
        for upper, lower in zip(several[::2], several[1::2], strict=True):
            for one, other in zip(upper, lower, strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[sample], other[sample]) for sample in one)
