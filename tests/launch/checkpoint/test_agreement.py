"""All ranks save, or stop, after the same step, whether or not their method ever waits for all."""

import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.ranks import run_ranks
from tests.training import batch, checkpoints, config, exchange, restore, share, start, weights
from tests.waiting import PATIENCE_S, until
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.checkpoint.agreement import Agreement, Ask
from thinpipe.pipeline.comm.errors import TransportError

pytestmark = pytest.mark.dist

AHEAD = 5
OPTIONS: dict[str, Any] = {"bucket_mb": 0.01, "interval": 4, "overlap": 1, "warmup_steps": 2}


def run_of(method: str) -> Any:
    """Two replicas, which meet every four steps if the method lets them."""
    return config(
        model={"layers": 2},
        pipeline={"cuts": [], "replicas": 2, "microbatches": 1},
        gradcomp=exchange(method, **OPTIONS),
    )


def stop_in_every_method(rank: int, folder: str) -> dict[str, Any]:
    """By method: the last step, what save and resume say, and what both do in three more steps."""
    return {method: _stop(rank, method, Path(folder) / method) for method in method_names()}


def _stop(rank: int, method: str, root: Path) -> Any:
    run = run_of(method)
    store = PrefixStore(method, _get_default_store())
    built, again = start(run), start(run)
    saves, restored = (
        checkpoints(run, each, rank, root=root, store=store) for each in (built, again)
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
    resumed = restore(restored)
    losses = [[step(each, done + i) for i in range(3)] for each in (built, again)]
    one, other = weights(built), weights(again)
    same = losses[0] == losses[1] and all(torch.equal(one[n], other[n]) for n in one)
    return done, saved, resumed, same


@pytest.mark.slow
def test_every_method_saves_soon_after_it_is_asked_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    one, other = run_ranks(2, stop_in_every_method, str(tmp_path))
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


def test_ranks_that_ask_for_different_things_do_the_same() -> None:
    one, *others = run_ranks(3, ask_at_once)
    assert all(other == one for other in others)
    assert one[-1][1] == Ask.STOP


def ask_where_one_is_silent(_rank: int) -> None:
    agreement = Agreement(_get_default_store(), 0, 2, done=0, wait_s=0.2)
    agreement.ask(Ask.SAVE)
    with pytest.raises(TransportError, match="another rank did not say within 0 s"):
        deque(map(agreement.after, count(1)), maxlen=0)


def test_training_does_not_wait_forever_for_a_silent_rank() -> None:
    run_ranks(1, ask_where_one_is_silent)


def two_of(world: int) -> tuple[TCPStore, Agreement, Agreement]:
    """Ranks 0 and 1, in this process; the test plays the others."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (Agreement(store, rank, world, done=0, wait_s=PATIENCE_S) for rank in (0, 1))
    return store, first, second


def common(agreement: Agreement, begun: int) -> tuple[int, Ask]:
    """The first thing that is done, and after which step, if this rank makes step after step."""
    for step in count(begun):
        if asked := agreement.after(step):
            return step, asked
        time.sleep(0.001)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("asked", [False, True])
def test_a_closed_agreement_leaves_no_thread(asked: bool) -> None:
    """Whether it waits for a request, or for the answers of ranks that are gone."""
    store, first, second = two_of(3)
    if asked:
        first.ask(Ask.SAVE)
        until(lambda: store.check(["agreement/0/0", "agreement/0/1"]))
    first.close()
    second.close()
    assert not first._thread.is_alive()
    assert not second._thread.is_alive()


def test_what_was_asked_and_not_done_the_next_agreement_is_asked() -> None:
    """Also what is asked of the old one later, by a thread that still knows that."""
    store, first, second = two_of(3)
    heirs = [Agreement(PrefixStore("next", store), rank, 2, done=4, wait_s=9) for rank in (0, 1)]
    first.ask(Ask.SAVE)
    first.close(heirs[0])
    second.close(heirs[1])
    one, other = (common(heir, 5) for heir in heirs)
    assert one == other
    assert one[1] == Ask.SAVE
    assert second.stop_all().wait(PATIENCE_S)
    one, other = (common(heir, one[0] + 1) for heir in heirs)
    assert one == other
    assert one[1] == Ask.STOP
    for heir in heirs:
        heir.close()


def test_after_a_loss_nobody_waits_for_an_answer_nor_hears_the_last_one() -> None:
    """A request that comes after it is for those who are left, in the agreement that follows."""
    store, first, second = two_of(3)
    second.release()
    first.ask(Ask.STOP)
    until(lambda: store.check(["agreement/0/0"]))
    assert second.after(1) == Ask.NOTHING
    store.multi_set(["agreement/0/1", "agreement/0/2"], ["[1, 0]", "[1, 0]"])  # before it was lost
    assert first.after(1) == Ask.STOP
    assert second.after(2) == Ask.NOTHING
    first.close()
    second.close()
