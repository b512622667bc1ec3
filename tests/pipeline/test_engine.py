"""What a step does besides training: batches it rejects, evaluation, silent peers, totals."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.training import TORCH_2_13, batch, config, share, single_process, start, train_steps
from thinpipe.pipeline.comm.errors import TransportError

pytestmark = pytest.mark.dist

AQSGD: Any = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct"}}]


def rejected(rank: int, run: Any, ids: list[int]) -> str:
    built = start(run)
    built.engine.begin(torch.arange(1, 8), torch.tensor(ids))
    wrong = replace(batch([1, 2, 3, 4]), ids_B=torch.tensor(ids))
    with pytest.raises(ValueError, match="sample") as caught:
        built.engine.train_step(wrong, 0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 6, 5, 7], "sample ids [5] appear twice"),
        ([5, 6, 8, -1], "sample ids [8, -1] are none of this replica's"),
    ],
)
def test_ids_that_no_memory_can_serve_are_rejected(
    ranks: Ranks, ids: list[int], message: str
) -> None:
    for reported in ranks(2, rejected, config(boundary=AQSGD), ids):
        assert reported.startswith(message)


def test_a_short_batch_is_split_into_fewer_parts(ranks: Ranks) -> None:
    run = config(train={"accumulate": 4, "clip_norm": 0})
    batches = [batch([1, 2, 3, 4, 5, 6, 7, 8]), batch([9, 10, 11])]
    losses, _, _ = ranks(2, train_steps, run, batches)[0]
    expected, _ = single_process(config(train={"clip_norm": 0}), batches)
    assert losses == pytest.approx(expected, rel=1e-5)


def evaluate(rank: int, run: Any, ids: list[int]) -> list[tuple[float, int]]:
    built = start(run)
    part = share(batch(ids), rank // run.pipeline.pipeline_ranks, run.pipeline.replicas)
    return [built.engine.eval_step(part, 0, compressed=compressed) for compressed in (False, True)]


@pytest.mark.parametrize(
    "schedule",
    ["Deep1F1B", "Interleaved1F1B", pytest.param("ZBVZeroBubble", marks=TORCH_2_13)],
)
def test_evaluation_is_the_same_under_every_placement(ranks: Ranks, schedule: str) -> None:
    cuts = [1] if schedule == "Deep1F1B" else [1, 2, 3]
    run = config(pipeline={"schedule": schedule, "cuts": cuts})
    (loss, tokens), _ = ranks(2, evaluate, run, [1, 2, 3, 4, 5])[0]
    (expected, _), _ = ranks(1, evaluate, config(pipeline={"cuts": []}), [1, 2, 3, 4, 5])[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert tokens == batch([1, 2, 3, 4, 5]).targets.numel()


def test_a_replica_without_held_out_samples_takes_part(ranks: Ranks) -> None:
    run = config(pipeline={"cuts": [2], "replicas": 2})
    everyone = ranks(4, evaluate, run, [3])
    assert all(found == everyone[0] for found in everyone)
    assert everyone[0][0][1] == batch([3]).targets.numel()


def totals_of(rank: int, run: Any) -> Any:
    built = start(run)
    whole = batch(list(range(8)))
    part = share(whole, rank // run.pipeline.pipeline_ranks, run.pipeline.replicas)
    return built.engine.train_step(part, 0)


def test_all_ranks_see_the_same_totals(ranks: Ranks) -> None:
    run = config(pipeline={"cuts": [2], "replicas": 2}, boundary=AQSGD)
    everyone = ranks(4, totals_of, run)
    for totals in everyone:
        assert totals == everyone[0]
    assert everyone[0].tokens == batch(list(range(8))).targets.numel()
    assert 0 <= everyone[0].bubble < 1
    assert [w.messages for w in everyone[0].wire] == [8, 8]  # 4 microbatches x 2 replicas
    assert everyone[0].sync_bytes > 0


def fall_silent(rank: int, account: Path) -> None:
    """Rank 1 stops answering without dying."""
    built = start(config(pipeline={"cuts": [2]}), timeout_s=2)
    if rank == 1:
        limit = time.monotonic() + 90
        while not account.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        return
    begin = time.monotonic()
    with pytest.raises(TransportError) as caught:
        built.engine.train_step(batch([1, 2, 3, 4]), 0)
    account.write_text(f"{time.monotonic() - begin:.1f} {caught.value}")


def test_a_silent_peer_is_given_up_after_the_timeout(ranks: Ranks, tmp_path: Path) -> None:
    account = tmp_path / "account"
    ranks(2, fall_silent, account)
    seconds, reported = account.read_text(encoding="utf-8").split(" ", 1)
    assert 1.5 < float(seconds) < 60  # the timeout is 2 s
    assert reported.startswith("stage 1 (rank 1) -> stage 0 (rank 0), cut 2 backward: lost")
