"""What a step shows is the same number whatever keeps replicas together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import run_ranks
from tests.training import batch, config, exchange, share, start
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import IGNORED_TARGET, Batch

STEPS = 3
Losses = dict[str, list[tuple[bool, float, int]]]
"""By method and step: whether replicas met, the loss, and of how many tokens."""


STAGES = ("none", "diloco")
"""Methods that are tried with two stages too: one that meets in each step, one that seldom does."""


def _run(method: str, **pipeline: Any) -> RunConfig:
    """Weights stay as they are, so that losses can be compared in every step."""
    return config(
        pipeline={"microbatches": 2, "cuts": [], **pipeline},
        gradcomp=exchange(method, interval=2, overlap=0),
        train={"batch_size": 4, "lr": 1e-30, "weight_decay": 0},
    )


def _uneven(step: int) -> Batch:
    """Of eleven of twelve tokens of the first half of the samples nothing is to be learnt."""
    whole = batch([4 * step + i for i in range(4)])
    targets = whole.targets.clone()
    targets[:2, 1:] = IGNORED_TARGET
    return replace(whole, targets=targets)


def _losses(rank: int, methods: Sequence[str], cuts: Sequence[int]) -> Losses:
    found = {}
    for method in methods:
        built = start(_run(method, cuts=cuts, replicas=2))
        dp_rank = built.engine.transport.mesh.dp_rank
        totals = [
            built.engine.train_step(share(_uneven(step), dp_rank, 2), step) for step in range(STEPS)
        ]
        met = [built.sync.due(step) for step in range(STEPS)]
        built.sync.finish()
        found[method] = [(m, t.loss, t.tokens) for m, t in zip(met, totals, strict=True)]
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_the_loss_is_the_mean_over_the_tokens_that_it_says() -> None:
    """Of all replicas where they meet, otherwise of the rank's own, as one process has it."""
    by_rank = run_ranks(2, _losses, method_names(), [])
    by_rank += run_ranks(4, _losses, STAGES, [2])
    with in_process(_run("none"), total_steps=STEPS) as built:

        def loss(item: Batch, step: int) -> tuple[float, int]:
            total = built.engine.train_step(item, step)
            return total.loss, total.tokens

        whole = [loss(_uneven(step), step) for step in range(STEPS)]
        own = [[loss(share(_uneven(s), dp_rank, 2), s) for s in range(STEPS)] for dp_rank in (0, 1)]
    assert not torch.allclose(*(torch.tensor([each[0] for each in dp_rank]) for dp_rank in own))
    for dp_rank, losses in zip((0, 1, 0, 0, 1, 1), by_rank, strict=True):
        for method, steps in losses.items():
            for step, (met, found, tokens) in enumerate(steps):
                expected = whole[step] if met else own[dp_rank][step]
                assert found == pytest.approx(expected[0], rel=1e-5), (method, step)
                assert tokens == expected[1] * (1 if met else 2), (method, step)
    assert {met for met, *_ in by_rank[0]["diloco"]} == {True, False}
