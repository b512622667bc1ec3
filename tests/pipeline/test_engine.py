"""What a step does besides training: batches it rejects, evaluation, silent peers, totals."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import run_ranks
from tests.training import TORCH_2_13, batch, config, share, start
from thinpipe.pipeline.comm.errors import TransportError

pytestmark = pytest.mark.dist
AQSGD: Any = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct"}}]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 6, 5, 7], r"sample ids \[5\] appear twice"),
        ([5, 6, 8, -1], r"sample ids \[8, -1\] are none of this replica's"),
    ],
)
def test_ids_that_no_memory_can_serve_are_rejected(ids: list[int], message: str) -> None:
    wrong = replace(batch([1, 2, 3, 4]), ids_B=torch.tensor(ids))
    with in_process(config(boundary=AQSGD), total_steps=1) as built:
        built.engine.begin(torch.arange(1, 8), wrong.ids_B)
        with pytest.raises(ValueError, match=message):
            built.engine.train_step(wrong, 0)


PLACEMENTS = ["Deep1F1B", "Interleaved1F1B"]
if not TORCH_2_13.args[0]:
    PLACEMENTS.append("ZBVZeroBubble")


def evaluate_under_all(rank: int) -> list[tuple[float, int]]:
    found = []
    for schedule in PLACEMENTS:
        cuts = [1] if schedule == "Deep1F1B" else [1, 2, 3]
        built = start(config(pipeline={"schedule": schedule, "cuts": cuts}))
        found.append(built.engine.eval_step(batch([1, 2, 3, 4, 5]), 0, compressed=False))
    return found


def test_evaluation_is_the_same_under_every_placement() -> None:
    with in_process(config(pipeline={"cuts": []}), total_steps=1) as built:
        expected, count = built.engine.eval_step(batch([1, 2, 3, 4, 5]), 0, compressed=False)
    assert count == batch([1, 2, 3, 4, 5]).targets.numel()
    for loss, tokens in run_ranks(2, evaluate_under_all)[0]:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert tokens == count


def of_two_replicas(rank: int, run: Any) -> tuple[Any, list[tuple[float, int]]]:
    """Totals of a step, and an evaluation in which the second replica has no samples."""
    built, replica = start(run), rank // 2
    totals = built.engine.train_step(share(batch(list(range(8))), replica, 2), 0)
    part = share(batch([3]), replica, 2)
    return totals, [built.engine.eval_step(part, 0, compressed=on) for on in (False, True)]


def test_all_ranks_see_the_same_totals_and_one_without_samples_takes_part() -> None:
    everyone = run_ranks(4, of_two_replicas, config(pipeline={"replicas": 2}, boundary=AQSGD))
    assert all(found == everyone[0] for found in everyone)
    totals, evaluated = everyone[0]
    assert evaluated[0][1] == batch([3]).targets.numel()
    assert totals.tokens == batch(list(range(8))).targets.numel()
    assert 0 <= totals.bubble < 1
    assert [w.messages for w in totals.wire] == [8, 8]  # 4 microbatches x 2 replicas
    assert totals.sync_bytes > 0


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


def test_a_silent_peer_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    account = tmp_path / "account"
    run_ranks(2, fall_silent, account)
    seconds, reported = account.read_text(encoding="utf-8").split(" ", 1)
    assert 1.5 < float(seconds) < 60  # the timeout is 2 s
    assert reported.startswith("stage 1 (rank 1) -> stage 0 (rank 0), cut 2 backward: lost")
