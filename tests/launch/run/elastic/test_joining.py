"""A replica joins a run that is under way."""

import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from tests.launch.run.elastic.launchers import SAMPLES, TWO_BY_TWO, Launchers
from tests.launch.run.elastic.test_sections import Recorder, end, grouped
from tests.launch.run.elastic.trained import members
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.ranks.failures import LOST, Losses
from thinpipe.launch.net.ranks.group import Newcomer
from thinpipe.launch.run.elastic import door, generations, hosts
from thinpipe.launch.run.elastic.door import Door
from thinpipe.launch.run.elastic.visits import Elastic
from thinpipe.pipeline.comm.gloo import GlooTransport

pytestmark = pytest.mark.dist
WORLD, UNREACHABLE = 3, -1
KNOCKS = "door/knocks"


class Run(Recorder):
    """A run whose whole state is a number, which its replicas change alike."""

    def __init__(self, transport: GlooTransport) -> None:
        super().__init__(transport)
        self.state, self.invited = 0.0, threading.Event()
        self.in_bring_up: Callable[[], None] = lambda: None

    def welcome(self) -> None:
        self.invited.set()

    def bring_up(self, places: Sequence[int]) -> None:
        self.in_bring_up()
        mine = torch.tensor([self.state], dtype=torch.float64)
        states = self._transport.share(mine, "world")[:, 0].tolist()
        if self._transport.mesh.rank in places:
            self.state = states[0]

    def step(self) -> float:
        one = torch.ones(1, dtype=torch.float64)
        self.state += float(self._transport.share(one, "world").sum())
        return self.state


def connected(
    rank: int, port: int, *, wait_s: float = 60, comes: bool = False
) -> tuple[Store, Run, Elastic]:
    """As a rank of three, or as one that comes later."""
    store = grouped(0, port, 1, name=f"alone{rank}") if comes else grouped(rank, port, WORLD)
    transport = GlooTransport(1, 1 if comes else WORLD, timeout_s=60)
    run, newcomer = Run(transport), None
    if comes:
        own = PrefixStore(f"own{rank}", store)
        newcomer = Newcomer(store, own, say=lambda _: None, take_part=lambda: None)
    settings = {"host": f"host{rank}", "least": 1, "wait_s": wait_s, "patience_s": 30}
    elastic = Elastic(store, transport, run, newcomer=newcomer, **settings)
    return store, run, elastic


def lose(store: Store, rank: int) -> None:
    Losses(store).report(rank, f"rank {rank} is gone")
    raise SystemExit


def lost_then_joined(
    rank: int, port: int, lost_meanwhile: int, answer_s: float = 5.0
) -> dict[str, Any]:
    """Rank 2 is lost in the second step, and ranks 3 and 4 come, one after the other.

    `lost_meanwhile` is lost while rank 3 is let in: 1, 3, or nobody; or rank 1 cannot reach it.
    Who knocks has `answer_s`.
    """
    door._ANSWER_S = answer_s
    if lost_meanwhile == UNREACHABLE:
        _cut_off(rank)
    store, run, elastic = connected(rank, port, comes=rank >= WORLD)
    results: list[float] = []
    if rank == lost_meanwhile:
        run.in_bring_up = lambda: lose(store, elastic.number)
    try:
        if rank >= WORLD:
            store.wait([f"may come {rank}"], timedelta(seconds=60))
            elastic.join()
        else:
            results.append(elastic.together(run.step))
            results.append(elastic.together(run.step if rank < 2 else lambda: lose(store, 2)))
            elastic.admit()  # nobody is there: it does nothing
            store.set("may come 3", "")
            _admit(rank, store, run, elastic, "first")
        if rank != 4:
            results.append(elastic.together(run.step))
        if lost_meanwhile in (3, UNREACHABLE) or rank == 4:
            store.set("may come 4", "")
            if rank != 4:
                _admit(rank, store, run, elastic, "second")
            results.append(elastic.together(run.step))
    except SystemExit:
        pass
    return {"results": results, "told": run.told, "hosts": elastic.hosts}


def _cut_off(rank: int) -> None:
    """Rank 3 has an address, where rank 1 does not reach it."""

    def reach(*_: Any) -> None:
        if rank == 1:
            raise OverlayError("its port is taken here")

    hosts.own_number, hosts.reach = lambda: 3 if rank == 3 else None, reach  # type: ignore[assignment]
    generations.end_now = end  # type: ignore[assignment]


def _admit(rank: int, store: Store, run: Run, elastic: Elastic, visit: str) -> None:
    """Once somebody was invited, as all agreed."""
    if rank == 0:
        assert run.invited.wait(60)
        run.invited.clear()
        store.set(visit, "")
    store.wait([visit], timedelta(seconds=60))
    elastic.admit()


@pytest.mark.parametrize("answer_s", [5.0, 0.0])
def test_a_replica_comes_and_has_the_state_of_the_others(answer_s: float) -> None:
    """Also if it is too busy to answer at first."""
    first, second, lost, third = members(4, lost_then_joined, 9, answer_s)
    assert lost["results"] == [3]
    assert first["results"] == second["results"] == [3, 5, 8]
    assert third["results"] == [8]
    assert first["told"] == [
        (1, (0, 3), "lost: rank 2 is gone"),
        (2, (0, 2), "joined: host3, as rank 3"),
    ]
    assert third["told"] == [(2, (0, 1), "joined: host3, as rank 3")]
    assert first["hosts"] == third["hosts"] == {0: "host0", 1: "host1", 3: "host3"}


def test_a_rank_is_lost_while_another_is_let_in() -> None:
    """Those who are left let it in all the same."""
    first, lost, _, third = members(4, lost_then_joined, 1)
    assert lost["results"] == [3, 5]
    assert first["results"] == [3, 5, 7]
    assert third["results"] == [7]
    assert first["hosts"] == third["hosts"] == {0: "host0", 3: "host3"}


@pytest.mark.parametrize("how", [3, UNREACHABLE])
def test_one_that_is_lost_at_the_door_makes_room_for_the_next(how: int) -> None:
    """Or one that a member cannot reach."""
    first, second, _, lost, fourth = members(5, lost_then_joined, how)
    assert lost["results"] == []
    assert first["results"] == second["results"] == [3, 5, 7, 10]
    assert fourth["results"] == [10]
    assert first["hosts"] == fourth["hosts"]
    assert [*first["hosts"].values()] == ["host0", "host1", "host4"]


WAITS_S = 2.0


def waits_for_its_turn(rank: int, port: int) -> list[float]:
    """Ranks 1 and 2 are lost; rank 4 knocks, and rank 3 is served for longer than it waits."""
    store, run, elastic = connected(rank, port, comes=rank >= WORLD)

    def give(send: Any, close: Any) -> None:
        if store.add("given", 1) == 1:
            store.wait([f"elastic/{KNOCKS}/2"], timedelta(seconds=60))
            time.sleep(1.5 * WAITS_S)

    run.give = give  # type: ignore[method-assign]
    enter = elastic._door.enter
    elastic._door.enter = lambda own, _, check: enter(own, WAITS_S, check)  # type: ignore[method-assign]
    if rank < WORLD:
        with suppress(SystemExit):
            for lost in (2, 1):
                elastic.together(run.step if rank != lost else lambda: lose(store, rank))
            store.set("may come", "")
            _admit(rank, store, run, elastic, "first")
    else:
        store.wait(["may come" if rank == 3 else f"elastic/{KNOCKS}/1"], timedelta(seconds=60))
        elastic.join()
    if rank in (0, 3):
        _admit(rank, store, run, elastic, "second")
    return [elastic.together(run.step)] if rank in (0, 3, 4) else []


def test_a_newcomer_waits_until_another_is_served() -> None:
    first, _, _, third, fourth = members(5, waits_for_its_turn)
    assert first == third == fourth == [6]  # the steps of 2, 1 and 3 replicas


@pytest.mark.parametrize("said", ["", "{", "7", "[7]", "[0, 7]", '[0, ["3"]]', "[0, [true]]"])
def test_a_knock_that_is_no_list_of_numbers_is_nobody_s(said: str) -> None:
    """It must not end the thread that listens for the next."""
    store = HashStore()
    store.set("door/knocks/1", said)
    assert Door(store).knocked(1) == []


def nobody_is_missing(rank: int, port: int) -> str:
    store, _, elastic = connected(rank, port, wait_s=0.5, comes=rank >= WORLD)
    if rank < WORLD:
        store.wait(["rejected"], timedelta(seconds=60))
        return ""
    with pytest.raises(ConfigError, match="it has all its replicas") as raised:
        elastic.join()
    store.set("rejected", "")
    return str(raised.value)


def test_a_run_that_has_all_its_replicas_lets_nobody_in() -> None:
    assert "--join" in members(4, nobody_is_missing)[3]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", ["[]", "[1]"])
def test_a_killed_replica_comes_back(tmp_path: Path, cuts: str) -> None:
    """A first try is ended while it waits, and holds nobody up."""
    run = Launchers(tmp_path, f"pipeline.cuts={cuts}", "train.epochs=16", "train.verify_every=1")
    run.wait_for_step(6)
    early = run.join(3)
    until(lambda: "waiting for the run to let this replica in" in run.said(3))
    early.send_signal(signal.SIGTERM)
    assert early.wait(PATIENCE_S) == 128 + signal.SIGTERM, run.said(3)
    assert "stopped: this machine was not in the run yet" in run.said(3)
    run.kill_rank(2 if cuts == "[]" else 5)
    until(lambda: any("in place of 3" in run.said(number) for number in range(3)))
    run.join(4)
    codes = run.done()
    assert sorted(codes) == [0, 0, 0, LOST, 128 + signal.SIGTERM], [run.said(n) for n in range(5)]
    numbers = "rank 4" if cuts == "[]" else "ranks 8, 9"
    assert any(f"as {numbers}; from step" in run.said(number) for number in range(3))
    assert "samples go to 3 replicas in place of 2" in run.said(4)
    assert run.summary["samples"] == {str(epoch): SAMPLES for epoch in range(1, 17)}


@pytest.mark.slow
def test_a_newcomer_gets_its_state_from_ranks_of_two_replicas(tmp_path: Path) -> None:
    """Then one of its own takes the place of one of those, and gives its state to the next."""
    settings = ("train.epochs=16", "train.verify_every=1")
    run = Launchers(tmp_path, *TWO_BY_TWO, *settings, count=4, apart=True)
    given = re.compile(r"MB of state in [0-9.]+ s, in training")
    for lost, giver, comes in ((1, 3, 4), (3, 5, 6)):
        run.kill_rank(lost, after=run.steps + 9)
        until(lambda giver=giver: f"ranks 0, {giver} are a replica now" in run.said(0))
        gives = run.number_of(giver)
        before = len(given.findall(run.said(gives)))
        for number in (comes, comes + 1):
            run.join(number, "--ranks", "1")
        until(lambda comes=comes: "; from step" in run.said(comes))
        assert len(given.findall(run.said(gives))) > before, run.said(gives)
    codes = run.done()
    assert sorted(codes) == [0] * 4 + [LOST] * 4, [run.said(n) for n in range(8)]
    assert run.summary["samples"] == {str(epoch): SAMPLES for epoch in range(1, 17)}
