"""All stages in one process: the same bits and bytes as one process per stage."""

from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import run_ranks
from tests.training import RAW, batch, config, train_steps, weights
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.step_stats import StepTotals
from thinpipe.pipeline.wire.told import WireTotal

# samples come back, so that AQ-SGD sends changes; uneven microbatches; first visits among known
BATCHES = [
    batch(list(range(8))),
    batch([9, 11, 13, 15, 17, 19]),
    batch([3, 2, 9, 30, 1]),
    batch(list(range(8))),
]
AQSGD = {"forward": {"kind": "aqsgd", "bits": 3}, "backward": {"kind": "direct", "bits": 6}}
TRANSFORM = {"kind": "transform", "step": 0.3}


def stages(boundary: dict[str, Any], **pipeline: Any) -> RunConfig:
    found = {"cuts": [1, 2, 3], **pipeline}
    return config(pipeline=found, boundary=[boundary], train={"clip_norm": 0.5})  # type: ignore[arg-type]


RUNS = {
    "raw": stages({"forward": RAW, "backward": RAW}, schedule="GPipe"),
    "AQ-SGD": stages(AQSGD, schedule="Deep1F1B"),
    # codecs compute in fp32 as on threads of their own: no model's autocast reaches those
    "transform, bf16": stages(
        {"forward": TRANSFORM, "backward": TRANSFORM}, schedule="GPipe", precision="bf16"
    ),
}


def sent(built: Built, totals: StepTotals) -> tuple[tuple[WireTotal, ...], bool]:
    return totals.wire, totals.skipped


def held_out(built: Built) -> list[tuple[float, int]]:
    item = batch([40, 41, 42])
    return [built.engine.eval_step(item, 0, compressed=on) for on in (False, True)]


def ranks_then_evaluate(rank: int, run: RunConfig, batches: list[Batch]) -> Any:
    evaluations: list[Any] = []

    def check(built: Built, totals: StepTotals) -> Any:
        evaluations.append(held_out(built))
        return sent(built, totals)

    losses, found, seen = train_steps(rank, run, batches, check)
    return losses, found, seen, evaluations


def one_process(run: RunConfig, batches: list[Batch]) -> Any:
    losses, seen, evaluations = [], [], []
    with in_process(run, total_steps=100) as built:
        for step, item in enumerate(batches):
            totals = built.engine.train_step(item, step)
            losses.append(totals.loss)
            evaluations.append(held_out(built))
            seen.append(sent(built, totals))
        return losses, weights(built), seen, evaluations


def all_ways(rank: int) -> dict[str, Any]:
    return {name: ranks_then_evaluate(rank, run, BATCHES) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """What four ranks find, one group for all ways."""
    return run_ranks(4, all_ways)


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process_per_stage(four: list[dict[str, Any]], name: str) -> None:
    losses, found, seen, evaluations = one_process(RUNS[name], BATCHES)
    held = set[str]()
    for by_name in four:
        theirs = by_name[name]
        assert theirs[0] == losses
        assert theirs[2] == seen
        assert theirs[3] == evaluations
        for weight, value in theirs[1].items():
            assert torch.equal(value, found[weight]), weight
        held |= set(theirs[1])
    assert held == set(found)


def test_two_runs_one_after_the_other_give_the_same_losses() -> None:
    run = config(pipeline={"cuts": [2]}, boundary=[AQSGD])  # type: ignore[arg-type]
    first, second = (one_process(run, BATCHES[:2])[0] for _ in range(2))
    assert first == second


def test_an_exact_tie_is_shared() -> None:
    run = config(model={"tie_embeddings": "exact"})
    _, found, _, _ = one_process(run, BATCHES[:2])
    assert torch.equal(found["token_embedding.weight"], found["head.weight"])


@pytest.mark.parametrize(
    "pipeline", [{"replicas": 2}, {"cuts": [1, 2, 3], "schedule": "Interleaved1F1B"}]
)
def test_what_is_not_one_pipeline_with_one_stage_per_rank_is_rejected(
    pipeline: dict[str, Any],
) -> None:
    run = config(pipeline=pipeline)
    with pytest.raises(ValueError, match="use replicas = 1"), in_process(run, total_steps=1):
        pass
