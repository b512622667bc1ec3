"""Replicas that do steps by themselves between two sections lose one, or are late."""

import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from tests.launch.run.elastic.test_sections import WAIT_S, end, joined, shared
from tests.launch.run.elastic.trained import members
from tests.waiting import PATIENCE_S
from thinpipe.launch.net.ranks.failures import Losses
from thinpipe.launch.run.elastic import generations, sections
from thinpipe.pipeline.comm.errors import SilentError, TransportError

pytestmark = pytest.mark.dist


def at_different_steps(rank: int, port: int) -> dict[str, Any]:
    """Rank 0 has done four steps by itself and rank 1 one as rank 2 is lost."""
    store, transport, run, elastic = joined(rank, port, 3)

    def step(number: int) -> int:
        run.done += 1
        if rank == 0 and number == 3:
            store.set("ahead", "")
        if rank == 1 and number == 0:
            store.wait(["elastic/ready/1/0"], timedelta(seconds=PATIENCE_S))
        if rank == 2:
            store.wait(["ahead"], timedelta(seconds=PATIENCE_S))
            Losses(store).report(2, "rank 2 is gone")
            raise SystemExit
        return number

    alone, results = [], []
    try:
        for number in range(6):
            alone.append(elastic.together(partial(step, number), alone=True))
            if rank == 0 and number == 3:
                store.wait(["losses/log/1"], timedelta(seconds=PATIENCE_S))
                time.sleep(1)  # in which it is heard of
        results.append(elastic.together(partial(shared, transport, rank)))
    except SystemExit:
        return {}
    return {"alone": alone, "results": results, "told": run.told, "from": run.shared_from}


def test_replicas_that_are_at_different_steps_lose_one() -> None:
    """No step is done again, and both know from which one on samples are shared anew."""
    first, second, _ = members(3, at_different_steps)
    for rank, found in enumerate((first, second)):
        assert found["alone"] == [*range(6)]
        assert found["results"] == [[0, 1]]
        assert found["told"] == [(1, (rank, 3), "lost: rank 2 is gone")]
        assert found["from"] == [4]


def one_is_late(rank: int, port: int, least: int) -> dict[str, Any]:
    """Rank 1 is steps behind where the others meet, who wait for it only so long."""
    _, transport, run, elastic = joined(rank, port, 3, timeout_s=4, least=least)
    generations.end_now = end  # type: ignore[assignment]
    sections._WAITED = 3 / WAIT_S

    def step() -> None:
        run.done += 1
        if rank == 1 and run.done > 1:
            time.sleep(1)

    share = partial(shared, transport, rank)
    try:
        elastic.together(share)  # all have started
        for _ in range(10):
            elastic.together(step, alone=True)
        results = elastic.together(share)
    except SystemExit as ended:
        return {"ended": str(ended)}
    return {"results": results, "told": run.told}


def test_a_replica_that_is_late_for_a_section_is_left_out() -> None:
    first, late, third = members(3, one_is_late, 2)
    for found in (first, third):
        assert found["results"] == [0, 2]
        assert found["told"][0][2] == "lost: ranks [1], which came too late"
    assert late["ended"].endswith("the others go on without it, as its replica is lost")


def test_a_late_replica_is_waited_for_if_too_few_would_be_left() -> None:
    for found in members(3, one_is_late, 3):
        assert found["results"] == [0, 1, 2]


def one_is_slow_as_an_exchange_breaks(rank: int, port: int) -> dict[str, Any]:
    """Rank 0 has known for long that its exchange got nothing, as it comes to where all meet."""
    _, transport, run, elastic = joined(rank, port, 3)
    generations.end_now = end  # type: ignore[assignment]
    failures = [SilentError("rank 2 -> rank 0: nothing")] if rank == 0 else []

    def step() -> None:
        run.done += 1
        if rank == 1 and run.done > 1:
            time.sleep(1)

    def share() -> list[float]:
        if failures:
            raise failures.pop()
        return shared(transport, rank)

    for _ in range(5):
        elastic.together(step, alone=True)
    return {"results": elastic.together(share)}


def test_a_slow_replica_is_not_left_out_for_anothers_silence() -> None:
    for found in members(3, one_is_slow_as_an_exchange_breaks):
        assert found["results"] == [0, 1, 2]


def one_stage_is_behind(rank: int, port: int) -> dict[str, Any]:
    """The last message of a step by themselves reaches rank 0 and not rank 1; rank 3 is lost."""
    store, transport, _, elastic = joined(rank, port, 4, stages=2)
    generations.end_now = end  # type: ignore[assignment]
    forgotten = []

    def step(number: int) -> list[float]:
        mine = torch.tensor([10.0 * number + rank], dtype=torch.float64)
        found: list[float] = transport.share(mine, "replica").flatten().tolist()
        if number == 1 and rank == 1:
            store.wait(["losses/log/1"], timedelta(seconds=PATIENCE_S))
            raise TransportError("rank 0 -> rank 1: lost")
        if number == 1 and rank == 0:
            store.set("has it", "")
        if number == 1 and rank == 3:
            store.wait(["has it"], timedelta(seconds=PATIENCE_S))
            Losses(store).report(3, "rank 3 is gone")
            raise SystemExit
        return found

    results = []
    try:
        for number in range(3):
            results.append(
                elastic.together(
                    partial(step, number),
                    forget=partial(forgotten.append, number),
                    take=lambda packed: [*packed, "taken"],
                    alone=True,
                )
            )
        results.append(elastic.together(partial(shared, transport, rank)))
    except SystemExit:
        pass
    return {"results": results, "forgot": forgotten}


def test_a_step_of_a_replica_by_itself_counts_for_all_its_ranks() -> None:
    first, second, *lost = members(4, one_stage_is_behind)
    assert first["results"] == [[0, 1], [10, 11], [20, 21], [0, 1]]
    assert second["results"] == [[0, 1], [10, 11, "taken"], [20, 21], [0, 1]]
    assert second["forgot"] == []
    assert [len(found["results"]) for found in lost] in ([2, 1], [1, 1])
