"""Replicas are lost, stop and come as seeded schedules say: nobody hangs, all hold the same."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.launch.run.elastic.trained import leave, ranks_of, trains
from tests.waiting import PATIENCE_S
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.elastic.visits import Elastic
from thinpipe.launch.run.proof import digest
from thinpipe.pipeline.comm.errors import TransportError

WORLD, STOPPED_S, LAST = 3, 20.0, 400
LOCAL = ["diloco", "sparse_loco"]
METHODS = ["ef_gradients", *LOCAL, "allreduce", "cocktail", "demo"]
DONOR = "the donor is lost"
KINDS = ["lost as another joins", "two at once", "joins and is lost", "returns at once", DONOR]
KINDS += ["stopped"]
SCHEDULES = int(os.environ.get("SCHEDULES", len(METHODS) * len(KINDS)))


@dataclass(frozen=True)
class Schedule:
    """Ranks 3 and 4 come later, one after the other.

    `lost` says after which step a rank is, `lost_at_join` which one as a newcomer gets its state;
    `stopped` gets SIGSTOP for 20 s after step `at`. `come` are those that are let in. A connection
    of `unaware` breaks before it knows that rank 3 is in. Exchanges of local steps `overlap`.
    """

    kind: str
    method: str
    at: int
    lost: dict[int, int]
    lost_at_join: int | None = None
    stopped: int | None = None
    unaware: int | None = None
    come: tuple[int, ...] = (3,)
    overlap: int = 0

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
        method, at = METHODS[seed // len(KINDS) % len(METHODS)], draw.randint(2, 9)
        one, other = draw.sample([1, 2], 2)
        cycle = seed // len(KINDS)
        overlap = 2 * ((seed + cycle + cycle // len(METHODS)) % 2)
        more: dict[str, Any] = {"overlap": overlap} if method in LOCAL else {}
        if kind == "two at once":
            return cls(
                kind, method, at, {one: at, other: at + draw.randint(0, 1)}, **more, come=(3, 4)
            )
        if kind == "stopped":
            return cls(kind, method, at, {}, stopped=draw.choice([0, one]), come=(), **more)
        victims = {"lost as another joins": other, "joins and is lost": 3, DONOR: 0}
        if kind == "joins and is lost":
            more |= {"come": (3, 4), "unaware": draw.choice([None, other])}
        return cls(kind, method, at, {one: at}, lost_at_join=victims.get(kind), **more)

    @property
    def settings(self) -> list[str]:
        local = f"{{interval={3 + self.overlap}, overlap={self.overlap}, bucket_mb=0.02}}"
        options = [f"gradcomp.{self.method}={local}"] if self.method in LOCAL else []
        return [
            f"gradcomp.method={self.method}",
            *options,
            f"train.epochs={LAST}",
            f"train.verify_every={3 + self.overlap if self.method in LOCAL else 1}",
            "pipeline.peer_timeout_s=200",
        ]

    @property
    def stay(self) -> list[int]:
        """Who is there in the end."""
        gone = {*self.lost, self.lost_at_join}
        return [rank for rank in (*range(WORLD), *self.come) if rank not in gone]


class Part:
    """What a rank does of a schedule."""

    def __init__(self, rank: int, store: TCPStore, schedule: Schedule) -> None:
        self.rank, self._store, self._plan = rank, store, schedule
        self.found = dict[int, int]()
        """Digests of what all hold alike, by the steps that are done."""
        self.plan: Any = None
        """Of the samples that are left."""

    def lost_at_join(self, training: ElasticTraining) -> None:
        if self.rank == self._plan.lost_at_join:
            self._store.set("may come 4", "")
            leave(training)

    def adapt(self, adapt: Callable[..., None], passes: int, words: str, **more: Any) -> None:
        """Instead of `adapt`, which tells the run that its members are others."""
        if self.rank == self._plan.unaware and "as rank 3" in words:
            raise TransportError("broken by this test")
        adapt(passes, words, **more)

    def each(self, training: ElasticTraining, step: int) -> None:
        """After every step."""
        plan, rank, store = self._plan, self.rank, self._store
        self.found[step], self.plan = digest(_alike(training)), training._plan.state
        if rank == plan.stopped and step == plan.at:
            stop_for(STOPPED_S)
        if plan.lost.get(rank) == step:
            leave(training)
        if rank == 0:
            self._lead(training, step)
        if rank >= WORLD and len(self.found) == 4:
            store.set("may come 4", "")
            store.set(f"in {rank}", "")

    def _lead(self, training: ElasticTraining, step: int) -> None:
        """Let others come, and stop all in the end."""
        plan, store = self._plan, self._store
        if step == plan.at + (plan.kind != "returns at once"):
            store.set("may come 3", "")
        arrived = [f"in {other}" for other in plan.come if other != plan.lost_at_join]
        enough = step > plan.at + 5 and all(store.check([key]) for key in arrived)
        if enough and not training.stopping:
            training.stop(whole=True)


def _alike(training: ElasticTraining) -> list[Any]:
    modules = [module_of(stage) for stage in training.built.stages]
    weights = [parameter for module in modules for parameter in module.parameters()]
    return training.built.sync.alike() or weights


def take_part(rank: int, port: int, folder: str, seed: int) -> tuple[dict[int, int], Any]:
    """As one of the ranks: what it found, and whose samples are whose in the end."""
    schedule, store = Schedule.of(seed), TCPStore("127.0.0.1", port, is_master=False)
    part, settings = Part(rank, store, schedule), schedule.settings
    bring_up, adapt = ElasticTraining.bring_up, Elastic._adapt

    def brought_up(training: ElasticTraining, places: Any) -> None:
        part.lost_at_join(training)
        bring_up(training, places)

    def adapted(elastic: Elastic, *arguments: Any, **more: Any) -> None:
        part.adapt(partial(adapt, elastic), *arguments, **more)

    ElasticTraining.bring_up = brought_up  # type: ignore[method-assign]
    Elastic._adapt = adapted  # type: ignore[method-assign]
    if rank >= WORLD:
        if rank not in schedule.come:
            return {}, None
        store.wait([f"may come {rank}"], timedelta(seconds=PATIENCE_S))
        settings.append(f"run.folder={folder}/{rank}")
    trains(rank, port, folder, *settings, each=part.each, comes=rank >= WORLD)
    return part.found, part.plan


def stop_for(seconds: float) -> None:
    """SIGSTOP to this process; a child lets it go on."""
    own = os.getpid()
    if (child := os.fork()) == 0:
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)
    os.waitpid(child, 0)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_a_schedule_ends_with_all_alike(tmp_path: Path, seed: int) -> None:
    """Or, if rank 0 is lost, for all, within the time that ranks wait for each other."""
    schedule, count = Schedule.of(seed), WORLD + 2
    if schedule.kind == DONOR:
        with pytest.raises(AssertionError) as ended:
            ranks_of(tmp_path, count, take_part, seed)
        assert "nothing after" not in str(ended.value), schedule
        assert "without it the others do not go on" in str(ended.value), schedule
        return
    found, plans = zip(*ranks_of(tmp_path, count, take_part, seed), strict=True)
    first = found[0]
    assert first, schedule
    for rank, digests in enumerate(found):
        assert first.items() >= digests.items(), (rank, schedule)
    assert {max(found[rank]) for rank in schedule.stay} == {max(first)}, schedule
    assert all(plans[rank] == plans[0] for rank in schedule.stay), (plans, schedule)
