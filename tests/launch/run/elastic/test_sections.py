"""Ranks are lost in a section, or between two: the others do it together, or none does."""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from tests.launch.run.elastic.trained import members
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.net.ranks import gloo_backend
from thinpipe.launch.net.ranks.failures import Losses
from thinpipe.launch.run.elastic import generations
from thinpipe.launch.run.elastic.visits import Elastic
from thinpipe.pipeline.comm.errors import SilentError, TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.gloo_link import irecv, isend, wait

pytestmark = pytest.mark.dist
SENT_NBYTES = 2**26
WAIT_S = 60.0


class Recorder:
    """What `Elastic` tells the run."""

    def __init__(self, transport: GlooTransport) -> None:
        self._transport, self.told, self.proofs = transport, list[Any](), 0
        self.done, self.shared_from = 0, list[int]()

    passes, agreed, at, came = 7, (0, 0), (0, 0), 0
    steps_are_joint, leaves = True, False

    def settle(self) -> None: ...

    def check_own(self, at: Any) -> None: ...

    def give(self, send: Any, close: Any) -> None: ...

    def take(self, connect: Any) -> None:
        def ignore() -> None:
            with suppress(TransportError):
                connect()

        threading.Thread(target=ignore, daemon=True).start()

    def regrouped(
        self, change: int, before: tuple[int, int], passes: int, words: str, **more: Any
    ) -> None:
        assert passes == self.passes
        self.told.append((change, before, words))
        self.shared_from.append(more.get("at", 0))

    def end_saves(self) -> None: ...

    def welcome(self) -> None: ...

    def bring_up(self, places: Any) -> None: ...

    def prove_equal(self) -> None:
        self._transport.share(torch.zeros(1, dtype=torch.float64), "world")
        self.proofs += 1

    def interrupt(self) -> None: ...

    def leave_now(self) -> None: ...


def grouped(rank: int, port: int, world: int, *, name: str = "first") -> Store:
    """This process is in another group from now on; the store that it was given."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    gloo_backend.register("127.0.0.1", joining=True)
    dist.destroy_process_group()
    dist.init_process_group(
        gloo_backend.BACKEND,
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=WAIT_S),
    )
    return store


def joined(
    rank: int, port: int, world: int, *, least: int = 1, timeout_s: float = WAIT_S, stages: int = 1
) -> tuple[Store, GlooTransport, Recorder, Any]:
    """As a rank of a run, whose connections can be broken."""
    store = grouped(rank, port, world)
    transport = GlooTransport(stages, world // stages, timeout_s=timeout_s)
    run: Any = Recorder(transport)
    elastic = Elastic(store, transport, run, host="here", least=least, wait_s=WAIT_S, patience_s=5)
    return store, transport, run, elastic


def shared(transport: GlooTransport, value: float) -> list[float]:
    """What all members have."""
    mine = torch.tensor([value], dtype=torch.float64)
    found: list[float] = transport.share(mine, "world").flatten().tolist()
    return found


def one_is_behind(rank: int, port: int) -> dict[str, Any]:
    """The last exchange of the second section reaches rank 0 and not rank 1; rank 2 is lost."""
    store, transport, run, elastic = joined(rank, port, 3)
    forgotten, attempts = [], [0]

    def share(section: int) -> list[float]:
        attempts[0] += 1
        found = shared(transport, 10.0 * section + rank)
        if section == 1 and rank == 2:
            Losses(store).report(2, "rank 2 is gone")
            raise SystemExit
        if section == 1 and rank == 1:
            raise TransportError("rank 2 -> rank 1: lost")
        return found

    results = []
    for section in range(4):
        try:
            results.append(
                elastic.together(
                    lambda section=section: share(section),
                    forget=lambda section=section: forgotten.append(section),
                    take=lambda packed: [*packed, "taken"],
                )
            )
        except SystemExit:
            break
    return {"results": results, "told": run.told, "forgot": forgotten, "proofs": run.proofs}


def test_a_section_counts_for_all_who_are_left_or_for_none() -> None:
    first, second, lost = members(3, one_is_behind)
    assert lost["results"] == [[0, 1, 2]]
    assert first["results"] == [[0, 1, 2], [10, 11, 12], [20, 21], [30, 31]]
    assert second["results"] == [[0, 1, 2], [10, 11, 12, "taken"], [20, 21], [30, 31]]
    assert first["told"] == [(1, (0, 3), "lost: rank 2 is gone")]
    assert second["told"] == [(1, (1, 3), "lost: rank 2 is gone")]
    assert first["forgot"] in ([], [2]), "it may have begun the third"
    assert second["forgot"] == []
    assert first["proofs"] == second["proofs"] == 1


def end(code: int, message: str = "") -> None:
    """In place of `end_now`."""
    raise SystemExit(f"{code} {message}")


def lost_between_sections(rank: int, port: int) -> dict[str, Any]:
    """Rank 0 has heard that rank 2 is lost before it begins the second section."""
    store, transport, _, elastic = joined(rank, port, 3)
    forgotten, share = list[int](), partial(shared, transport, rank)
    results = [elastic.together(share)]
    if rank == 2:
        Losses(store).report(2, "rank 2 is gone")
        return {}
    if rank == 0:
        until(lambda: bool(elastic.loss))
    results.append(elastic.together(share, forget=lambda: forgotten.append(rank)))
    return {"results": results, "forgot": forgotten}


def test_what_was_not_begun_is_not_forgotten() -> None:
    """What a method forgets is the step that it has begun last, which may be one that counts."""
    first, second, _ = members(3, lost_between_sections)
    assert first == {"results": [[0, 1, 2], [0, 1]], "forgot": []}
    assert second["results"] == [[0, 1, 2], [0, 1]]


class NeverConnects(Store):
    """Of a rank that says where it listens, and is lost once the others have said it too."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        raise AssertionError("lost in `wait`")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timedelta(seconds=PATIENCE_S))
        time.sleep(1)  # in which they begin to wait for its connection
        raise RuntimeError("lost")


def killed_while_regrouping(rank: int, port: int, connects: bool) -> dict[str, Any]:
    """Rank 3 is lost in a section; then rank 2 as it joins the others, or `connects` to them."""
    store, transport, run, elastic = joined(rank, port, 4)
    join, make = dist.init_process_group, dist.ProcessGroupGloo
    share = partial(shared, transport, rank)

    def leave(*_: Any, **__: Any) -> Any:
        Losses(store).report(rank, f"rank {rank} is gone")
        raise SystemExit

    def never(given: Store, *arguments: Any) -> Any:
        with suppress(RuntimeError):
            make(NeverConnects(given), *arguments)
        leave()

    never._Options = make._Options  # type: ignore[attr-defined]
    results, began_s = [elastic.together(share)], time.monotonic()
    if rank == 2:
        if connects:
            dist.ProcessGroupGloo = never  # type: ignore[assignment,misc]
        else:
            dist.init_process_group = leave
        store.set("is to leave", "")
    store.wait(["is to leave"], timedelta(seconds=PATIENCE_S))
    try:
        results.append(elastic.together(leave if rank == 3 else share))
    except SystemExit:
        dist.init_process_group, dist.ProcessGroupGloo = join, make  # type: ignore[misc]
    return {"results": results, "told": run.told, "took_s": time.monotonic() - began_s}


@pytest.mark.parametrize("connects", [False, True])
def test_a_rank_that_is_lost_while_others_regroup(connects: bool) -> None:
    """They do not wait as long as for a slow one, and make a generation without it."""
    first, second, *_ = members(4, killed_while_regrouping, connects)
    for found in (first, second):
        assert found["results"] == [[0, 1, 2, 3], [0, 1]]
        assert [generation for generation, *_ in found["told"]] == [2]
        assert found["took_s"] < WAIT_S / 2
    assert "rank 2 is gone; rank 3 is gone" in first["told"][0][2]


def one_hangs(rank: int, port: int) -> dict[str, Any]:
    """Rank 2, in the second section; rank 1 is the first to run out of patience."""
    store, transport, run, elastic = joined(rank, port, 3, timeout_s=4 if rank == 1 else WAIT_S)

    share = partial(shared, transport, rank)

    def hang() -> list[float]:
        store.wait([f"elastic/members/{elastic._generation + 1}"], timedelta(seconds=PATIENCE_S))
        return share()

    generations.end_now = end  # type: ignore[assignment]
    results, began_s = [elastic.together(share)], time.monotonic()
    try:
        results.append(elastic.together(hang if rank == 2 else share))
    except SystemExit as ended:
        return {"ended": str(ended)}
    return {"results": results, "told": run.told, "took_s": time.monotonic() - began_s}


def test_a_rank_that_hangs_is_lost() -> None:
    """Who waits longer than the first who misses it is woken up."""
    first, second, hung = members(3, one_hangs)
    for found in (first, second):
        assert found["results"] == [[0, 1, 2], [0, 1]]
        assert "rank 2 on here: does not answer" in found["told"][0][2]
        assert found["took_s"] < WAIT_S / 2
    assert hung["ended"].endswith("the others go on without it, as its replica is lost")


def one_encodes_for_ever(rank: int, port: int) -> dict[str, Any]:
    """Rank 2 is lost in the second section; rank 1's exchange goes on and on."""
    store, transport, run, elastic = joined(rank, port, 3)

    def settle() -> None:
        raise TimeoutError

    def share() -> list[float]:
        if results:
            store.set(f"second {rank}", "")
        if rank == 2 and results:  # a rank may be slow to end the first
            until(lambda: store.check(["second 0", "second 1"]))
            elastic.leave("rank 2 is gone")
            raise SystemExit
        return shared(transport, rank)

    generations.end_now = end  # type: ignore[assignment]
    if rank == 1:
        run.settle = settle
    results: list[list[float]] = []
    began_s = time.monotonic()
    try:
        for _ in range(2):
            results.append(elastic.together(share))
    except SystemExit as ended:
        return {"ended": str(ended)}
    return {"results": results, "took_s": time.monotonic() - began_s}


def test_a_rank_whose_exchange_does_not_end_is_lost_alone() -> None:
    first, stuck, _ = members(3, one_encodes_for_ever)
    assert first["results"] == [[0, 1, 2], [0]]
    assert first["took_s"] < WAIT_S / 2, "it is not waited for"
    assert "its exchange does not end: the others go on" in stuck["ended"]


def too_few_are_left(rank: int, port: int, lost: int, least: int) -> str:
    """What is raised where a rank is lost that the others cannot go on without."""
    store, transport, _, elastic = joined(rank, port, 3, least=least)

    def share() -> None:
        if rank == lost:
            Losses(store).report(rank, f"rank {rank} is gone")
            raise SystemExit
        transport.share(torch.zeros(1, dtype=torch.float64), "world")

    try:
        elastic.together(share)
    except (SystemExit, TransportError) as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("lost", "least", "why"),
    [
        (2, 3, "; replicas left: 2, fewer than elastic.min_replicas = 3"),
        (0, 1, "; replica 0 writes the run's folder: without it the others do not go on"),
    ],
)
def test_below_the_least_or_without_rank_0_the_failure_is_raised(
    lost: int, least: int, why: str
) -> None:
    said = members(3, too_few_are_left, lost, least)
    assert all(text.endswith(why) for rank, text in enumerate(said) if rank != lost), said


def nobody_was_lost(
    rank: int, port: int, kind: type[TransportError], fails: int, ahead: bool
) -> dict[str, Any] | str:
    """Rank 0 fails so often in the second section; the other may be `ahead` then."""
    _, transport, run, elastic = joined(rank, port, 2)
    failures = [0]

    def share(section: int) -> list[float]:
        found = shared(transport, rank) if ahead else []
        if rank == 0 and section == 1 and failures[0] < fails:
            failures[0] += 1
            raise kind("an edge")
        return found or shared(transport, rank)

    results = []
    try:
        for section in range(3):
            results.append(
                elastic.together(partial(share, section), take=lambda packed: [*packed, "taken"])
            )
    except TransportError as error:
        return str(error)
    return {"results": results, "told": run.told, "proofs": run.proofs}


@pytest.mark.parametrize(
    ("kind", "ahead"), [(TransportError, False), (SilentError, False), (TransportError, True)]
)
def test_all_connect_anew_if_none_is_lost(kind: type[TransportError], ahead: bool) -> None:
    found = members(2, nobody_was_lost, kind, 1, ahead)
    words = "all are there: they have connected anew"
    for rank, one in enumerate(found):
        assert one["told"] == [(1, (rank, 2), words)]
        assert one["proofs"] == 1, "that replicas are still equal"
    taken = ["taken"] * ahead
    assert found[0]["results"] == [[0, 1], [0, 1, *taken], [0, 1]]
    assert found[1]["results"] == [[0, 1]] * 3


def test_a_section_that_fails_again_without_a_loss_ends_the_run() -> None:
    first, second = members(2, nobody_was_lost, TransportError, 2, False)
    assert first == "an edge"
    assert "rank 0" in second


def killed_in_a_message(rank: int, port: int) -> dict[str, Any]:
    """Rank 2 is lost in the second section, while the others send it more than it takes."""
    store, _, _, elastic = joined(rank, port, 3)

    def send() -> list[float]:
        group = dist.group.WORLD
        assert group is not None
        if rank == 2:
            irecv(torch.empty(SENT_NBYTES, dtype=torch.uint8), group, 0, edge="in")
            store.wait(["sent/0", "sent/1"], timedelta(seconds=PATIENCE_S))
            Losses(store).report(2, "rank 2 is gone")
            raise SystemExit
        if dist.get_world_size() == 3:
            message = torch.zeros(SENT_NBYTES, dtype=torch.uint8)
            work = isend(message, group, 2, edge="out")
            store.set(f"sent/{rank}", "")
            wait(work, edge="out")
        return [dist.get_world_size()]

    began_s = time.monotonic()
    try:
        results = elastic.together(send)
    except SystemExit:
        return {}
    return {"results": results, "took_s": time.monotonic() - began_s}


def test_a_rank_that_is_lost_in_the_middle_of_a_message() -> None:
    """gloo leaves who sends waiting."""
    first, second, _ = members(3, killed_in_a_message)
    for found in (first, second):
        assert found["results"] == [2]
        assert found["took_s"] < WAIT_S / 2
