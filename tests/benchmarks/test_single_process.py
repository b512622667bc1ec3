"""All stages in one process: the same bits and bytes as one process per stage."""

from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import Ranks
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


def assert_equal(by_rank: Any, here: Any) -> None:
    losses, found, seen, evaluations = here
    for theirs in by_rank:
        assert theirs[0] == losses
        assert theirs[2] == seen
        assert theirs[3] == evaluations
        for name, weight in theirs[1].items():
            assert torch.equal(weight, found[name]), name
    assert set().union(*(theirs[1] for theirs in by_rank)) == set(found)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("boundary", "schedule"),
    [(AQSGD, "Deep1F1B"), ({"forward": RAW, "backward": RAW}, "GPipe")],
    ids=["aq", "raw"],
)
def test_equals_one_process_per_stage(ranks: Ranks, boundary: Any, schedule: str) -> None:
    pipeline = {"schedule": schedule, "cuts": [1, 2, 3]}
    run = config(pipeline=pipeline, boundary=[boundary], train={"clip_norm": 0.5})  # type: ignore[arg-type]
    assert_equal(ranks(4, ranks_then_evaluate, run, BATCHES), one_process(run, BATCHES))


@pytest.mark.dist
def test_in_bf16_codecs_compute_as_on_threads_of_their_own(ranks: Ranks) -> None:
    """No model's autocast reaches those; a transform multiplies matrices."""
    transform = {"kind": "transform", "step": 0.3}
    both = {"forward": transform, "backward": transform}
    pipeline = {"cuts": [2], "precision": "bf16", "schedule": "GPipe"}
    run = config(pipeline=pipeline, boundary=[both])  # type: ignore[arg-type]
    assert_equal(ranks(2, ranks_then_evaluate, run, BATCHES), one_process(run, BATCHES))


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
def test_what_is_not_one_pipeline_with_one_stage_per_rank_is_refused(
    pipeline: dict[str, Any],
) -> None:
    run = config(pipeline=pipeline)
    with pytest.raises(ValueError, match="use replicas = 1"), in_process(run, total_steps=1):
        pass
