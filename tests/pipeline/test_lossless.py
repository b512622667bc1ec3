"""Raw boundaries: the pipeline is bit-equal to one process."""

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import RAW, TORCH_2_13, batch, config, single_process, train_steps
from thinpipe.launch.config.run import RunConfig

pytestmark = pytest.mark.dist

# even, uneven microbatches, a shorter last batch, fewer samples than microbatches, fewer tokens
BATCHES = [batch(list(range(8))), batch([9, 11, 13, 15, 17, 19]), batch([1, 2, 3, 4, 5])]
SHORT = [*BATCHES, batch([6, 7]), batch([1, 2, 3, 4], tokens=6), batch([3]), BATCHES[1]]


def pipeline(schedule: str, cuts: list[int], **more: Any) -> RunConfig:
    return config(pipeline={"schedule": schedule, "cuts": cuts}, train={"clip_norm": 0}, **more)


def train_all(rank: int, runs: list[RunConfig], batches: list[Any]) -> list[Any]:
    return [train_steps(rank, run, batches) for run in runs]


def check_equal(runs: list[RunConfig], batches: list[Any]) -> None:
    """Each as one process; all run in one group, one after the other."""
    of_ranks = run_ranks(runs[0].world_size, train_all, runs, batches)
    for run, results in zip(runs, zip(*of_ranks, strict=True), strict=True):
        losses, expected = single_process(run, batches)
        for rank_losses, found, _ in results:
            assert rank_losses == losses
            for name, weight in found.items():
                assert torch.equal(weight, expected[name]), name
        assert set().union(*(found for _, found, _ in results)) == set(expected)


def check_close(run: RunConfig) -> list[dict[str, torch.Tensor]]:
    """As one process but for the order of sums; returns the weights of each rank."""
    results = run_ranks(run.world_size, train_steps, run, BATCHES)
    losses, expected = single_process(run, BATCHES)
    for rank_losses, found, _ in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)
    return [found for _, found, _ in results]


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 3]])
def test_weights_equal_single_process_bit_for_bit(cuts: list[int]) -> None:
    check_equal([pipeline(name, cuts) for name in ("GPipe", "1F1B", "Deep1F1B")], SHORT)


@pytest.mark.parametrize(
    "schedule",
    [
        "Interleaved1F1B",
        "LoopedBFS",
        pytest.param("InterleavedZeroBubble", marks=TORCH_2_13),
        pytest.param("ZBVZeroBubble", marks=TORCH_2_13),
    ],
)
def test_several_stages_per_rank_equal_single_process(schedule: str) -> None:
    check_equal([pipeline(schedule, [1, 2, 3])], [*BATCHES, batch([6, 7, 8]), BATCHES[1]])


INTERLEAVED = {"schedule": "Interleaved1F1B", "cuts": [1, 2, 3, 4, 5, 6, 7]}


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"activation_checkpointing": True}},
        {"pipeline": {"precision": "bf16"}},
        {"train": {"accumulate": 2, "clip_norm": 0}},
        {"model": {"tie_embeddings": "exact"}, "pipeline": {"cuts": []}},
        {"model": {"layers": 8}, "pipeline": INTERLEAVED},
    ],
    ids=["checkpointing", "bf16", "accumulate", "one stage", "interleaved on four ranks"],
)
def test_features_keep_bit_equality(change: dict[str, Any]) -> None:
    run = config(**{"train": {"clip_norm": 0}, **change})
    check_equal([run], [*BATCHES, batch([3])])


def test_clipping_uses_the_norm_over_all_stages() -> None:
    check_close(config(pipeline={"cuts": [1, 2, 3]}, train={"clip_norm": 0.05}))


def test_two_replicas_of_two_stages_equal_one_process() -> None:
    weights = check_close(config(pipeline={"replicas": 2}, train={"clip_norm": 0}))
    for upper, lower in ((0, 2), (1, 3)):  # the same stage of both replicas
        for name, weight in weights[upper].items():
            assert torch.equal(weight, weights[lower][name])


TIED: Any = {"tie_embeddings": "exact"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_exact_tie_over_a_cut_equals_the_shared_weight(replicas: int) -> None:
    run = config(model=TIED, pipeline={"cuts": [1, 2], "replicas": replicas})
    weights = check_close(run)
    assert torch.equal(weights[0]["token_embedding.weight"], weights[2]["head.weight"])


@TORCH_2_13
def test_a_v_schedule_ties_by_sharing() -> None:
    (both, _) = check_close(pipeline("ZBVZeroBubble", [1, 2, 3], model=TIED))
    assert torch.equal(both["head.weight"], both["token_embedding.weight"])


def test_raw_bf16_is_what_the_boundary_says() -> None:
    """A cast at the cut changes the numbers: the lossless tests could not pass by accident."""
    raw16: Any = {"kind": "raw", "format": "bf16"}
    run = config(boundary=[{"forward": raw16, "backward": RAW}], train={"clip_norm": 0})  # type: ignore[arg-type]
    (losses, _, _), _ = run_ranks(2, train_steps, run, BATCHES)
    expected, _ = single_process(run, BATCHES)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=1e-2)
