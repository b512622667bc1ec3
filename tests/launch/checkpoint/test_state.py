"""Saves in the background: what fails is retried."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.distributed_c10d import _get_default_store

from tests.disk import full_disk
from tests.ranks import Ranks
from tests.training import batch, checkpoints, config, start
from tests.waiting import PATIENCE_S
from thinpipe.launch.checkpoint import files, state
from thinpipe.launch.checkpoint.agreement import Agreement, Ask

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


def test_a_failed_save_is_tried_again_by_all_ranks_after_a_pause(
    ranks: Ranks, tmp_path: Path
) -> None:
    one, other = ranks(2, _full_for_a_while, str(tmp_path))
    assert one == other
    first, again, [(step, saved)], steps, due = one
    assert (first, again, saved) == (False, False, True)
    assert step in (40, 41)  # twice as long after the second failure
    assert steps == [3]
    assert not due
