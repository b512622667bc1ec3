"""Whole runs whose stages are held by several ranks: as unsharded ones, whatever the feature."""

import copy
import itertools
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from psutil import Process
from pydantic import ValidationError

from tests.often import mostly_slow
from tests.ranks import run_ranks
from tests.training import TORCH_2_13, batch, config, share, start, train_steps, weights
from thinpipe.gradcomp.sharded.stage import StageShards
from thinpipe.launch.checkpoint.contents import collect, distribute
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.step_stats import StepTotals

NOWHERE = Path("unused")
"""Where frozen weights would be named from; these models have none."""

pytestmark = [pytest.mark.dist, TORCH_2_13]

BATCHES = [batch(list(range(first, first + 8))) for first in (0, 8, 0)]
AQSGD: Any = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct"}}]


def whole(results: list[Any], shards: int) -> dict[str, torch.Tensor]:
    """Weights by name, put together from the results of the ranks of a replica."""
    found: dict[str, torch.Tensor] = {}
    for first in range(0, len(results), shards):
        parts = [result[1] for result in results[first : first + shards]]
        found |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return found


def train_both(rank: int, sharded: RunConfig, plain: RunConfig) -> Any:
    """Both runs on the same ranks."""
    return [train_steps(rank, run, BATCHES) for run in (sharded, plain)]


def compare(sharded: RunConfig, plain: RunConfig, *, exact: bool = True) -> None:
    """Both runs have equal losses and weights; `plain` has replicas for shards.

    Both compute from tensors of the same shapes, at the same alignment, on one thread each.
    """
    found, expected = zip(*run_ranks(plain.world_size, train_both, sharded, plain), strict=True)
    losses = expected[0][0]
    assert all(result[0] == found[0][0] for result in found)
    assert found[0][0] == (losses if exact else pytest.approx(losses, rel=1e-5))
    reference = whole(expected[: plain.pipeline.pipeline_ranks], 1)
    for name, weight in whole(found, sharded.pipeline.shards).items():
        if exact:
            assert torch.equal(weight, reference[name]), name
        else:
            torch.testing.assert_close(weight, reference[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("schedule", mostly_slow(["1F1B", "Deep1F1B", "GPipe"], "Deep1F1B".__eq__))
def test_shards_are_replicas_bit_for_bit(schedule: str) -> None:
    # with seeds 8 and 9 the factor that clips depended on who held which part, when its norm was
    # computed in fp32; with others it did not, here
    both = {"train": {"accumulate": 2}, "boundary": AQSGD, "run": {"seed": 9}}
    compare(
        config(pipeline={"schedule": schedule, "shards": 2}, **both),
        config(pipeline={"schedule": schedule, "replicas": 2}, **both),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"tie_embeddings": "exact"}},
        {"model": {"activation_checkpointing": True}, "pipeline": {"precision": "bf16"}},
        {"pipeline": {"cuts": [], "precision": "bf16"}, "model": {"tie_embeddings": "exact"}},
        {"pipeline": {"cuts": [1, 2, 3], "schedule": "Interleaved1F1B"}},
    ],
    ids=["tied", "checkpointed", "one-stage", "interleaved"],
)
def test_other_features_work_on_shards(sections: Any) -> None:
    pipeline = sections.get("pipeline", {})
    compare(
        config(**{**sections, "pipeline": {**pipeline, "shards": 2}}),
        config(**{**sections, "pipeline": {**pipeline, "replicas": 2}}),
    )


@pytest.mark.slow
def test_gathering_for_every_microbatch_changes_the_order_of_sums_alone() -> None:
    """Uneven parts too: 257 rows, and 3 heads' worth of 15 columns."""
    odd = {"model": {"vocab": 257, "width": 15, "heads": 3}, "pipeline": {"cuts": []}}
    compare(
        config(**odd | {"pipeline": {"cuts": [], "shards": 2}}, shards={"gather": "microbatch"}),
        config(**odd | {"pipeline": {"cuts": [], "replicas": 2}}),
        exact=False,
    )


def _evaluated(rank: int, run: RunConfig) -> Any:
    built = start(run)
    engine, mesh = built.engine, built.engine.transport.mesh
    engine.train_step(share(BATCHES[0], mesh.dp_rank, mesh.dp_size), 0)
    held_out = batch([50, 51, 52])
    own = share(held_out, mesh.dp_rank, mesh.dp_size)
    if mesh.dp_rank == 1:  # as launch/run/training.py does
        own = batch([52, 50]).counting(1)
    tally = engine.eval_step(own, 0, compressed=False)
    return tally, engine.train_step(share(BATCHES[1], mesh.dp_rank, mesh.dp_size), 1).loss


def _both_evaluated(rank: int, *runs: RunConfig) -> Any:
    return [_evaluated(rank, run) for run in runs]


@pytest.mark.slow
def test_evaluation_is_of_the_weights_that_are_kept() -> None:
    """With quantized weights it is not that of what training computes with."""
    qsdp = {"method": "qsdp", "weight_bits": 2, "keep_below": 0, "gradient_bits": 32}
    sharded = config(pipeline={"shards": 2}, shards=qsdp, train={"lr": 1e-30})
    plain = config(pipeline={"replicas": 2}, train={"lr": 1e-30})
    ((found, quantized), (expected, exact)), *_ = run_ranks(4, _both_evaluated, sharded, plain)
    assert found == pytest.approx(expected, rel=1e-6)
    assert abs(quantized - exact) > 1e-3


QSDP: dict[str, Any] = {
    "pipeline": {"cuts": [2], "shards": 2, "replicas": 2},
    "boundary": AQSGD,
    "shards": {"method": "qsdp", "keep_below": 64, "bucket": 64, "weight_rounding": "learned"},
    "gradcomp": {
        "method": "cocktail",
        "cocktail": {"subset": 0.5, "topk": 0.3, "bits": 4, "bucket_mb": 0.01, "warmup_steps": 1},
    },
}


def _step(built: Built, number: int) -> StepTotals:
    mesh = built.engine.transport.mesh
    return built.engine.train_step(share(BATCHES[number % 3], mesh.dp_rank, mesh.dp_size), number)


def _train(rank: int, run: RunConfig) -> tuple[list[StepTotals], bool]:
    """Of five steps: totals, and whether a run resumed after three does the same."""
    whole, resumed = start(run), start(run)
    totals = [_step(whole, number) for number in range(3)]
    distribute(resumed, copy.deepcopy(collect(whole)), NOWHERE)
    last, again = ([_step(built, number) for number in (3, 4)] for built in (whole, resumed))
    one, other = weights(whole), weights(resumed)
    same = all(torch.equal(weight, other[name]) for name, weight in one.items())
    return totals + last, same and [t.loss for t in last] == [t.loss for t in again]


def _train_beside_exact(rank: int, run: RunConfig, plain: RunConfig) -> Any:
    """The same, and the first step of an uncompressed run."""
    return *_train(rank, run), _step(start(plain), 0)


@pytest.mark.slow
def test_all_links_compressed_goes_on_bit_for_bit() -> None:
    """AQ-SGD across cuts, QSDP between shards, Cocktail between replicas."""
    plain = config(pipeline={"cuts": [2], "shards": 2, "replicas": 2})
    found = run_ranks(8, _train_beside_exact, config(**QSDP), plain)
    exact = [one for *_, one in found]
    for (*_, last), same, _ in found:
        assert same
        assert min(last.weight_bytes, last.gradient_bytes, last.sync_bytes) > 0
    first, *_, last = found[0][0]
    assert first.loss == pytest.approx(exact[0].loss, abs=0.02)
    assert last.gradient_bytes < 0.45 * exact[0].gradient_bytes


DIFFERENCES: dict[str, Any] = {
    "pipeline": {"cuts": [], "shards": 2},
    "shards": {"method": "qsdp", "weights": "differences", "weight_bits": 3, "keep_below": 64},
}


def test_remembered_weights_survive_a_restart_bit_for_bit() -> None:
    for (*_, last), same in run_ranks(2, _train, config(**DIFFERENCES)):
        assert same
        assert last.weight_bytes < 0.5 * last.gradient_bytes


def _launched(rank: int, gather: str) -> list[tuple[int, int]]:
    """Buckets that replicas exchange, of all, when backward and the shards' sums are over."""
    built = start(
        config(
            pipeline={"cuts": [], "shards": 2, "replicas": 2},
            shards={"gather": gather},
            gradcomp={"method": "ef_gradients", "ef_gradients": {"bucket_mb": 0.005}},
        )
    )
    sync: Any = built.sync
    before_step, found = sync.before_step, []

    def counted() -> None:
        found.append((sync._readiness._next, len(sync._readiness._buckets)))
        before_step()

    sync.before_step = counted
    mesh = built.engine.transport.mesh
    for step, whole_batch in enumerate(BATCHES):
        built.engine.train_step(share(whole_batch, mesh.dp_rank, mesh.dp_size), step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_replicas_exchange_gradients_as_soon_as_shards_have_summed_them(gather: str) -> None:
    for found in run_ranks(4, _launched, gather):
        assert len(found) == len(BATCHES)
        assert all(launched == buckets > 4 for launched, buckets in found)


def _given_back(rank: int, run: RunConfig) -> float:
    """Of 100 MB that are freed while the newest 2 MB are kept."""
    torch.ones(7 << 20)  # freed at once, after which glibc by itself keeps what is smaller
    start(run)
    tensors = [torch.ones(1 << 19) for _ in range(50)]
    held = Process().memory_info().rss
    del tensors[:-1]
    return (held - Process().memory_info().rss) / 100e6


def test_blocks_that_are_freed_leave_memory() -> None:
    run = config(pipeline={"cuts": [], "shards": 2})
    assert min(run_ranks(2, _given_back, run)) > 0.9


def _end_in_exchange(shards: StageShards, number: int) -> None:
    """Of weights or gradients, the first forward having begun; it gathers 5 units."""
    (stage,) = shards.stages
    sites: Any = shards._exchanges.peers
    begun, calls, across = threading.Event(), itertools.count(1), sites._across
    stage.register_forward_pre_hook(lambda *_: begun.set())

    def ending(*args: Any) -> Any:
        begun.wait()
        if next(calls) == number:
            os._exit(9)
        return across(*args)

    sites._across = ending


def _without_one(rank: int, gather: str, found: Path) -> None:
    run = config(pipeline={"cuts": [], "shards": 2}, shards={"gather": gather})
    built = start(run, timeout_s=20)
    assert built.shards is not None
    if rank == 1:
        _end_in_exchange(built.shards, 1 if gather == "step" else 8)
    with pytest.raises(TransportError) as error:
        built.engine.train_step(share(BATCHES[0], rank, 2), 0)
    found.write_text(str(error.value))


@pytest.mark.parametrize("gather", [pytest.param("step", marks=pytest.mark.slow), "microbatch"])
def test_a_shard_that_is_lost_during_a_forward_or_backward_is_named(
    gather: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="rank 1: ended without a result") as error:
        run_ranks(2, _without_one, gather, tmp_path / "said")
    assert "rank 0" not in str(error.value)
    assert "stage 0 shard 1" in (tmp_path / "said").read_text(encoding="utf-8")


def rejected(**sections: Any) -> str:
    with pytest.raises(ValidationError) as error:
        config(**sections)
    return str(error.value)


def test_what_shards_cannot_do_is_rejected_by_name() -> None:
    zero_bubble = {"cuts": [1, 2, 3], "schedule": "InterleavedZeroBubble", "shards": 2}
    assert "splits the backward pass" in rejected(pipeline=zero_bubble)
    assert 'pipeline.device = "cpu"' in rejected(pipeline={"shards": 2, "device": "cuda"})
    assert "one device per rank" in rejected(pipeline={"shards": 2, "devices_per_rank": 2})
    auto = {"cuts": "auto", "stages": 2, "shards": 2}
    assert "give the cuts" in rejected(pipeline=auto)
    assert "pipeline.replicas = 2, pipeline.shards = 3" in rejected(
        pipeline={"shards": 3, "replicas": 2}
    )
    assert "does not quantize" in rejected(shards={"weight_bits": 8})
    assert "use a divisor" in rejected(pipeline={"shards": 2}, shards={"ranks_per_site": 4})
    differences = {"method": "qsdp", "weights": "differences"}
    assert "with 16 bits" in rejected(shards={**differences, "weight_bits": 16})
    assert 'use gather = "step"' in rejected(shards={**differences, "gather": "microbatch"})
    assert "use 2 to 8" in rejected(shards={"method": "qsdp", "weight_bits": 9})
    assert 'bucket = 64: method = "fsdp" does not quantize' in rejected(shards={"bucket": 64})


def test_an_older_torch_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    needed = r"pipeline.shards = 2: needs torch >= 2.13 \(this is 2.12.1\+cpu\)"
    assert re.search(needed, rejected(pipeline={"shards": 2}))


def test_settings_that_do_nothing_are_noted() -> None:
    def notices(count: int, **shards: Any) -> str:
        run = config(pipeline={"shards": count, "cuts": []}, shards=shards)
        return " ".join(run.notices())

    assert "[shards] is not used: pipeline.shards = 1" in notices(1, method="qsdp")
    assert "weights of 8 bits save nothing" in notices(4, method="qsdp", ranks_per_site=4)
    assert notices(1) == notices(4, method="qsdp", ranks_per_site=2) == ""
    assert notices(4, ranks_per_site=4) == ""


def test_one_shard_is_a_run_without_shards() -> None:
    plain = config(pipeline={"cuts": []})
    same = config(pipeline={"cuts": [], "shards": 1}, shards={"method": "qsdp"})
    ((found, expected),) = run_ranks(1, train_both, same, plain)
    assert found[0] == expected[0]
