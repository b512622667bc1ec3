"""All ranks save, or stop, after the same step, whether or not their method ever waits for all."""

from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.ranks import Ranks
from tests.training import batch, config, share, start, weights
from tests.waiting import PATIENCE_S
from thinpipe.gradcomp.registry import load_method, method_names
from thinpipe.launch.checkpoint.agreement import Agreement, Ask
from thinpipe.launch.checkpoint.state import Checkpoints
from thinpipe.launch.config.sections import CheckpointConfig
from thinpipe.launch.net.ranks.session import Session
from thinpipe.pipeline.comm.errors import TransportError

pytestmark = pytest.mark.dist

AHEAD = 5
OPTIONS: dict[str, Any] = {"bucket_mb": 0.01, "interval": 4, "overlap": 1, "warmup_steps": 2}


def run_of(method: str) -> Any:
    """Two replicas, which meet every four steps if the method lets them."""
    fields = load_method(method).Config.model_fields
    options = {name: value for name, value in OPTIONS.items() if name in fields}
    return config(
        model={"layers": 2},
        pipeline={"cuts": [], "replicas": 2, "microbatches": 1},
        gradcomp={"method": method, method: options},
    )


def stop_in_every_method(rank: int, folder: str) -> dict[str, Any]:
    """By method: the last step, what save and resume say, and what both do in three more steps."""
    return {method: _stop(rank, method, Path(folder) / method) for method in method_names()}


def _stop(rank: int, method: str, root: Path) -> Any:
    run = run_of(method)
    store = PrefixStore(method, _get_default_store())
    built, again = start(run), start(run)
    sessions = [Session(store, each.engine.transport, 7, rank, None) for each in (built, again)]
    saves, restored = (
        Checkpoints(root, CheckpointConfig(), each, session, {"config": run.shared()})
        for each, session in zip((built, again), sessions, strict=True)
    )
    agreement = Agreement(store, rank, 2, done=0, wait_s=PATIENCE_S)

    def step(built: Any, number: int) -> float:
        ids = list(range(8 * (number % 3), 8 * (number % 3) + 8))
        loss: float = built.engine.train_step(share(batch(ids), rank, 2), number).loss
        return loss

    for number in count():
        if rank == 1 and number == 1:  # while the other is where it gets without this one
            if method == "none":
                store.wait(["ahead"])
            agreement.stop_all()
        step(built, number)
        if rank == 0 and number == AHEAD:
            store.set("ahead", "")
        if agreement.after(number + 1) == Ask.STOP:
            break
    done = number + 1
    saved = saves.save(done)
    resumed = restored.restore(None)
    losses = [[step(each, done + i) for i in range(3)] for each in (built, again)]
    one, other = weights(built), weights(again)
    same = losses[0] == losses[1] and all(torch.equal(one[n], other[n]) for n in one)
    return done, saved, resumed, same


def test_every_method_saves_soon_after_it_is_asked_and_resumes_bit_for_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    one, other = ranks(2, stop_in_every_method, str(tmp_path))
    assert one == other
    for method in method_names():
        done, saved, resumed, same = one[method]
        assert (saved, resumed, same) == (True, done, True), method
    assert one["none"][0] > AHEAD


def ask_at_once(rank: int) -> list[tuple[int, Ask]]:
    """What is done after which step where all ask, for different things, at the same time."""
    agreement, found = Agreement(_get_default_store(), rank, 3, done=0, wait_s=PATIENCE_S), []
    dist.barrier()
    agreement.ask(Ask.STOP if rank == 2 else Ask.SAVE)
    for step in count(1):
        asked = agreement.after(step)
        if asked != Ask.NOTHING:
            found.append((step, asked))
        if asked == Ask.STOP:
            return found


def test_ranks_that_ask_for_different_things_do_the_same(ranks: Ranks) -> None:
    one, *others = ranks(3, ask_at_once)
    assert all(other == one for other in others)
    assert one[-1][1] == Ask.STOP


def ask_where_one_is_silent(_rank: int) -> None:
    agreement = Agreement(_get_default_store(), 0, 2, done=0, wait_s=0.2)
    agreement.ask(Ask.SAVE)
    with pytest.raises(TransportError, match="another rank did not say within 0 s"):
        deque(map(agreement.after, count(1)), maxlen=0)


def test_training_does_not_wait_forever_for_a_silent_rank(ranks: Ranks) -> None:
    ranks(1, ask_where_one_is_silent)
