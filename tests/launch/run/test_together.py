"""A call that only one rank makes ends with a sentence on the ranks that notice."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.run.together import Together
from thinpipe.pipeline.comm.errors import TransportError

Calls = Callable[[Together], None]


def run(*ranks: Calls, wait_s: float = 20) -> list[str | None]:
    """What each rank was told."""
    store = HashStore()

    def one(rank: int) -> str | None:
        together: Any = Together(store, rank, len(ranks), wait_s=wait_s)
        try:
            ranks[rank](together)
        except (ConfigError, TransportError) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def alike(together: Together) -> None:
    for epoch in range(12):
        together.step(epoch)
        together.passes("the end of the epoch", epoch + 1)
        together.passes("a checkpoint", epoch + 1)
        together.meet("run.evaluate", epoch + 1)
    together.meet("run.save_model", 12)


def test_ranks_that_make_the_same_calls_wait_for_each_other_and_go_on() -> None:
    assert run(alike, alike, alike) == [None, None, None]
    assert run(alike) == [None]


def test_an_evaluation_of_one_rank_is_told_from_the_others_next_step() -> None:
    def evaluates(together: Together) -> None:
        together.step(0)
        together.meet("run.evaluate", 1)

    def steps(together: Together) -> None:
        together.step(0)
        together.step(1)

    told, nothing = run(evaluates, steps)
    assert nothing is None
    assert told == (
        "after step 1 rank 0 makes the call run.evaluate, and rank 1 goes on to the next step: all "
        "ranks are needed for either; make every call of a run on every rank, none inside `if rank "
        "== 0`"
    )


def test_it_is_told_from_a_checkpoint_and_from_another_call_too() -> None:
    def saves(together: Together) -> None:
        together.passes("the end of the epoch", 3)
        together.passes("a checkpoint", 3)

    def evaluates(together: Together) -> None:
        together.meet("run.evaluate", 3)

    def exports(together: Together) -> None:
        together.meet("run.save_model", 3)

    told, _ = run(evaluates, saves)
    assert told is not None
    assert "rank 1 goes on to the end of the epoch" in told
    both = run(evaluates, exports)
    assert "goes on to run.save_model" in str(both[0])
    assert "goes on to run.evaluate" in str(both[1])


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_settings_say() -> None:
    told, _ = run(lambda t: t.meet("run.evaluate", 1), lambda t: t.step(0), wait_s=0.2)
    assert told == "run.evaluate: rank 1 did not call it within 0 s"
