"""Saves in the background: what fails is retried, and only training needs a copy."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.distributed_c10d import _get_default_store

from tests.disk import full_disk
from tests.launch.run.elastic.trained import as_rank, ranks_of
from tests.ranks import run_ranks
from tests.training import batch, checkpoints, config, start
from tests.waiting import PATIENCE_S
from thinpipe.launch.checkpoint import files, state
from thinpipe.launch.checkpoint.agreement import Agreement, Ask
from thinpipe.launch.corpus import check_data

pytestmark = pytest.mark.dist


def _full_for_a_while(rank: int, folder: str) -> Any:
    """Saves of steps 1 and 2 fail on rank 1's disk; ranks retry when rank 1 asks for it.

    A step takes a twentieth of the first pause.
    """
    now_s = 0.0
    state.time = SimpleNamespace(monotonic=lambda: now_s, perf_counter=time.perf_counter)
    run = config()
    built = start(run)
    store, root = _get_default_store(), Path(folder) / f"disk-{rank}"
    saves = checkpoints(run, built, root=root, store=store)
    if rank == 1:
        with full_disk():
            first, again = saves.save(1), saves.save(2)
    else:
        first, again = saves.save(1), saves.save(2)
    found = []
    agreement = Agreement(store, rank, 2, done=0, wait_s=PATIENCE_S)
    for step in range(100):
        if saves.retry_due() and rank == 1:
            agreement.ask(Ask.SAVE)
        built.engine.train_step(batch([1, 2, 3, 4]), step)
        if agreement.after(step + 1) == Ask.SAVE:
            found.append((step, saves.save(3)))
            break
        now_s += state._FIRST_PAUSE_S / 20
    return first, again, found, files.steps(root), saves.retry_due()


def test_a_failed_save_is_tried_again_by_all_ranks_after_a_pause(tmp_path: Path) -> None:
    one, other = run_ranks(2, _full_for_a_while, str(tmp_path))
    assert one == other
    first, again, [(step, saved)], steps, due = one
    assert (first, again, saved) == (False, False, True)
    assert step in (40, 41)  # twice as long after the second failure
    assert steps == [3]
    assert not due


def _trains_alone(rank: int, port: int, folder: str, *settings: str) -> Any:
    """How often the state was copied, which steps are saved, and whether copies are counted."""
    copied, snapshot = list[int](), state.snapshot

    def counted(*of: Any) -> Any:
        copied.append(1)
        return snapshot(*of)

    state.snapshot = counted
    settings = ("pipeline.replicas=1", "elastic={}", "gradcomp={}", *settings)
    with as_rank(rank, port, folder, *settings, world=1) as run:
        corpus = check_data(run.config)
        for _ in run.epochs(run.config.train.epochs):
            for samples in run.batches_of(corpus.train, run.config.train.batch_size):
                run.step(samples)
    steps = files.steps(Path(folder) / "run/checkpoints")
    return len(copied), steps, run.config.saves_in_training


@pytest.mark.parametrize(
    ("settings", "copies", "steps"),
    [
        (("train.epochs=1",), 0, [20]),
        (("train.epochs=2", "checkpoint.every_epochs=2"), 0, [40]),
        (("train.epochs=2",), 1, [20, 40]),
        (("train.epochs=1", "checkpoint.every_steps=8"), 2, [8, 16, 20]),
    ],
)
def test_only_a_save_during_training_needs_a_copy(
    tmp_path: Path, settings: tuple[str, ...], copies: int, steps: list[int]
) -> None:
    [found] = ranks_of(tmp_path, 1, _trains_alone, *settings)
    assert found == (copies, steps, copies > 0)
