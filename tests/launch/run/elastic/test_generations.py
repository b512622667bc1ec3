"""A run loses replicas and goes on, in the same processes."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from tests.processes import lives, named
from tests.ranks import Ranks
from tests.training import config
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.config.sections import CheckpointConfig
from thinpipe.launch.data.sampler import Change, EpochSampler
from thinpipe.launch.net.ranks import gloo_backend
from thinpipe.launch.net.ranks.failures import Losses
from thinpipe.launch.run.elastic import generations, hosts
from thinpipe.launch.run.elastic.visits import Elastic
from thinpipe.launch.run.training import Training
from thinpipe.launch.view.report.journal import Told
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.gloo_link import irecv, isend, wait

SAMPLES, EPOCHS = 240, 2
SENT_NBYTES = 2**26
RUN = """
[run]
name = "elastic"
folder = "{folder}"
[model]
layers = 2
width = 32
heads = 2
context = 32
[data]
path = "{text}"
sequence_length = 32
train_sequences = 240
eval_sequences = 6
[pipeline]
device = "cpu"
replicas = 3
[train]
epochs = 2
batch_size = 6
warmup_steps = 2
verify_every = 7
[checkpoint]
every_steps = 5
keep = 99
[gradcomp]
method = "{method}"
ef_gradients = {{ bucket_mb = 0.02, fraction = 0.1 }}
[elastic]
min_replicas = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = "".join(f"{n} squared is {n * n}.\n" for n in range(4000))
    (tmp_path / "text.txt").write_text(text)
    return tmp_path


def command(path: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(path)]


class Started:
    """A run under its launcher, with supervisors."""

    def __init__(self, folder: Path, method: str, *changes: str) -> None:
        self.folder, path = folder / "run", folder / "run.toml"
        path.write_text(RUN.format(folder=self.folder, text=folder / "text.txt", method=method))
        words = [word for change in changes for word in ("--set", change)]
        self._process = subprocess.Popen(
            [*command(path), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen: list[psutil.Process] = []

    def kill_rank(self, rank: int, *, after: int, by: int = signal.SIGKILL) -> None:
        """A signal, once so many steps are on record."""
        until(lambda: self.steps >= after or self._process.poll() is not None)
        assert self._process.poll() is None, self._process.communicate()
        self.seen = psutil.Process(self._process.pid).children(recursive=True)
        (found,) = named(self.seen, f"thinpipe {rank}")
        found.send_signal(by)

    @property
    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def done(self) -> tuple[int, str]:
        said, _ = self._process.communicate(timeout=PATIENCE_S)
        until(lambda: not any(map(lives, self.seen)))
        return self._process.returncode, " ".join(said.split())


@pytest.mark.slow
def test_a_run_goes_on_without_replicas_that_are_killed(folder: Path) -> None:
    run = Started(folder, "ef_gradients")
    run.kill_rank(2, after=8)
    run.kill_rank(1, after=30)
    code, said = run.done()
    assert code == 0, said
    assert "lost: rank 2" in said
    assert "samples go to 2 replicas in place of 3" in said
    assert "samples go to 1 replica in place of 2" in said
    records = read_metrics(run.folder / "metrics.jsonl")
    assert [record.step for record in records] == [*range(1, len(records) + 1)]
    counted = {
        epoch: sum(record.samples or 0 for record in records if record.epoch == epoch)
        for epoch in (1, 2)
    }
    assert counted == {1: SAMPLES, 2: SAMPLES}
    assert sum(record.tokens for record in records) == EPOCHS * SAMPLES * 32
    assert {record.samples for record in records} >= {6, 4, 2}
    assert records[-1].loss < records[0].loss - 1
    rates = [record.lr for record in records[2:]]
    assert rates == sorted(rates, reverse=True), "no jump up"
    assert rates[-1] < 0.01 * rates[0], "it decays to its end"
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
    told = Told(run.folder)
    assert told.info.total_steps == records[-1].step
    assert [place["rank"] for place in told.places] == [0]


def test_the_checkpoint_of_an_epoch_is_due_if_a_replica_leaves_at_its_end() -> None:
    """The sampler then holds the last step for one of the next epoch."""
    sampler = EpochSampler(
        40, batch_size=4, replicas=1, replica=0, seed=0, changes=[Change(10, 2, 2, 20)]
    )
    assert sampler.epoch(9) == 1
    options = CheckpointConfig(every_epochs=2)
    run: Any = SimpleNamespace(
        _config=SimpleNamespace(checkpoint=options),
        _sampler=sampler,
        _best_is_due=-1,
        _save_again=False,
        steps=20,
    )
    assert not Training._save_due(run, 0, 10)
    run._config.checkpoint = CheckpointConfig()
    assert Training._save_due(run, 0, 10)
    assert not Training._save_due(run, 0, 9)


@pytest.mark.slow
def test_it_goes_on_without_a_replica_that_stands_still(folder: Path) -> None:
    run = Started(folder, "ef_gradients", "network.patience_s=3")
    run.kill_rank(2, after=8, by=signal.SIGSTOP)
    code, said = run.done()
    assert code == 0, said
    assert "rank 2 on" in said
    assert "no sign of life for 3 s (network.patience_s); from step" in said
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


TWO_BY_TWO = (
    "pipeline.replicas=2",
    "pipeline.cuts=[1]",
    "pipeline.microbatches=2",
    'boundary=[{forward={kind="direct",bits=4},backward={kind="direct",bits=8}}]',
)


@pytest.mark.slow
def test_a_replica_of_two_stages_leaves_as_a_whole(folder: Path) -> None:
    run = Started(folder, "ef_gradients", *TWO_BY_TWO)
    run.kill_rank(3, after=12)
    code, said = run.done()
    assert code == 0, said
    assert "lost: rank 3" in said
    assert "rank 2: the others go on without it, as its replica is lost" in said
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
    assert summary["final_loss"] < summary["first_loss"] - 1


@pytest.mark.slow
def test_what_is_left_can_be_resumed_by_all_replicas(folder: Path) -> None:
    run = Started(folder, "allreduce")
    run.kill_rank(1, after=12)
    assert run.done()[0] == 0
    again = subprocess.run(
        [*command(folder / "run.toml"), "--resume", "--step", "30"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    said = " ".join(again.stdout.split())
    assert "samples go to 3 replicas in place of 2" in said
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


@pytest.mark.slow
def test_below_the_least_it_ends_as_before(folder: Path) -> None:
    run = Started(folder, "allreduce", "elastic.min_replicas=2")
    run.kill_rank(2, after=5)
    run.kill_rank(1, after=18)
    code, said = run.done()
    assert code == 1, said
    assert "replicas left: 1, fewer than elastic.min_replicas = 2" in said
    assert "rank 1 on " in said
    assert "continue from there with --resume" in said


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"gradcomp": {"method": "cocktail"}}, 'gradcomp.method = "cocktail": its replicas cannot'),
        (
            {"gradcomp": {"method": "async_average"}},
            "powersgd, sparse_loco, topk, with delayed = false and overlap = 0, or remove",
        ),
        (
            {"gradcomp": {"method": "ef_gradients", "ef_gradients": {"delayed": True}}},
            "allreduce, bytegrad, diloco, ef_gradients, powersgd",
        ),
        (
            {
                "pipeline": {"cuts": [2], "replicas": 2},
                "boundary": [{"forward": {"kind": "aqsgd"}, "backward": {"kind": "raw"}}],
            },
            r'boundary.forward.kind = "aqsgd" \(use "raw" or "direct"\) at cut 2',
        ),
        ({"elastic": {"min_replicas": 3}}, r"there are 2 \(pipeline.replicas\)"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {
        "pipeline": {"cuts": [], "replicas": 2},
        "boundary": [],
        "elastic": {"min_replicas": 1},
    }
    with pytest.raises(ValidationError, match=message):
        config(**{**base, **sections})
    config(**base)
    config(**{**base, **sections, "elastic": {"min_replicas": 2}})


@pytest.mark.parametrize(
    ("rank", "needed", "reported"),
    [(0, True, [2, 4]), (2, False, [4]), (3, True, [0, 1, 2, 4]), (4, False, [])],
)
def test_whose_word_counts_of_which_machine(
    rank: int, needed: bool, reported: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines a (ranks 0 and 1), b (2), c (3, with the store) and d (4) lose all others."""
    names = ["a", "a", "b", "c", "d"]
    monkeypatch.setattr(hosts, "coordinates", lambda: names[rank] == "c")
    store = HashStore()
    for other, name in enumerate(names):
        store.set(f"hosts/{other}", json.dumps([name, name == "c", None, {}]))
    found, losses = hosts.Hosts(store, rank, names[rank]), Losses(store)
    found.now(range(5))
    others = sorted({*names} - {names[rank]})
    for _ in range(2):
        found.report(others, losses)
    assert found.is_needed == needed
    assert [other for other in range(5) if losses.has(other)] == reported
    for number in range(1, len(reported) + 1):
        assert losses.wait(number)[1].endswith(": its machine is gone")


class Recorder:
    """What `Elastic` tells the run."""

    def __init__(self, transport: GlooTransport) -> None:
        self._transport, self.told, self.proofs = transport, list[Any](), 0

    passes, agreed, at, came = 7, (0, 0), (0, 0), 0

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

    def end_saves(self) -> None: ...

    def welcome(self) -> None: ...

    def bring_up(self, places: Any) -> None: ...

    def prove_equal(self) -> None:
        self._transport.share(torch.zeros(1, dtype=torch.float64), "world")
        self.proofs += 1

    def interrupt(self) -> None: ...


def joined(
    rank: int, port: int, world: int, *, least: int = 1, timeout_s: float = 60
) -> tuple[Store, GlooTransport, Recorder, Any]:
    """As a rank of a run, whose connections can be broken."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    gloo_backend.register("127.0.0.1", joining=True)
    dist.destroy_process_group()
    dist.init_process_group(
        gloo_backend.BACKEND,
        store=PrefixStore("first", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    transport = GlooTransport(1, world, timeout_s=timeout_s)
    run: Any = Recorder(transport)
    elastic = Elastic(store, transport, run, host="here", least=least, wait_s=60, patience_s=5)
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


@pytest.mark.dist
def test_a_section_counts_for_all_who_are_left_or_for_none(ranks: Ranks) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, lost = ranks(3, one_is_behind, store.port)
    assert lost["results"] == [[0, 1, 2]]
    assert first["results"] == [[0, 1, 2], [10, 11, 12], [20, 21], [30, 31]]
    assert second["results"] == [[0, 1, 2], [10, 11, 12, "taken"], [20, 21], [30, 31]]
    assert first["told"] == [(1, (0, 3), "lost: rank 2 is gone")]
    assert second["told"] == [(1, (1, 3), "lost: rank 2 is gone")]
    assert first["forgot"] == [2], "it had begun the third"
    assert second["forgot"] == []
    assert first["proofs"] == second["proofs"] == 1


def killed_while_regrouping(rank: int, port: int) -> dict[str, Any]:
    """Rank 3 is lost in the second section, and rank 2 while the others wait for it to join."""
    store, transport, run, elastic = joined(rank, port, 4)
    join = dist.init_process_group

    def leave(*_: Any, **__: Any) -> None:
        Losses(store).report(rank, f"rank {rank} is gone")
        raise SystemExit

    share = partial(shared, transport, rank)
    results, began_s = [elastic.together(share)], time.monotonic()
    if rank == 2:
        dist.init_process_group = leave
        store.set("is to leave", "")
    store.wait(["is to leave"], timedelta(seconds=PATIENCE_S))
    try:
        results.append(elastic.together(leave if rank == 3 else share))
    except SystemExit:
        dist.init_process_group = join
    return {"results": results, "told": run.told, "took_s": time.monotonic() - began_s}


@pytest.mark.dist
def test_a_rank_that_is_lost_while_others_regroup(ranks: Ranks) -> None:
    """They do not wait as long as for a slow one, and make a generation without it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, *_ = ranks(4, killed_while_regrouping, store.port)
    for found in (first, second):
        assert found["results"] == [[0, 1, 2, 3], [0, 1]]
        assert [generation for generation, *_ in found["told"]] == [2]
        assert found["took_s"] < 30
    assert "rank 2 is gone; rank 3 is gone" in first["told"][0][2]


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


def killed_while_connecting(rank: int, port: int) -> dict[str, Any]:
    """Rank 3 is lost in the second section, and rank 2 as it connects to the others."""
    store, transport, run, elastic = joined(rank, port, 4)
    make = dist.ProcessGroupGloo

    share = partial(shared, transport, rank)

    def leave() -> list[float]:
        Losses(store).report(rank, f"rank {rank} is gone")
        raise SystemExit

    def never(given: Store, *arguments: Any) -> Any:
        try:
            return make(NeverConnects(given), *arguments)
        except RuntimeError:
            leave()

    results, began_s = [elastic.together(share)], time.monotonic()
    if rank == 2:
        never._Options = make._Options  # type: ignore[attr-defined]
        dist.ProcessGroupGloo = never  # type: ignore[assignment,misc]
        store.set("is to leave", "")
    store.wait(["is to leave"], timedelta(seconds=PATIENCE_S))
    try:
        results.append(elastic.together(leave if rank == 3 else share))
    except SystemExit:
        dist.ProcessGroupGloo = make  # type: ignore[misc]
    return {"results": results, "told": run.told, "took_s": time.monotonic() - began_s}


@pytest.mark.dist
def test_a_rank_that_is_lost_while_others_connect_to_it(ranks: Ranks) -> None:
    """Nothing wakes up who waits for a connection, and it does not wait."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, *_ = ranks(4, killed_while_connecting, store.port)
    for found in (first, second):
        assert found["results"] == [[0, 1, 2, 3], [0, 1]]
        assert found["took_s"] < 30
    assert "rank 2 is gone; rank 3 is gone" in first["told"][0][2]


def one_hangs(rank: int, port: int) -> dict[str, Any]:
    """Rank 2, in the second section; rank 1 is the first to run out of patience."""
    store, transport, run, elastic = joined(rank, port, 3, timeout_s=2 if rank == 1 else 60)

    share = partial(shared, transport, rank)

    def hang() -> list[float]:
        store.wait(["elastic/members/1"], timedelta(seconds=PATIENCE_S))
        return share()

    def end(code: int, message: str = "") -> None:
        raise SystemExit(f"{code} {message}")

    generations.end_now = end  # type: ignore[assignment]
    results, began_s = [elastic.together(share)], time.monotonic()
    try:
        results.append(elastic.together(hang if rank == 2 else share))
    except SystemExit as ended:
        return {"ended": str(ended)}
    return {"results": results, "told": run.told, "took_s": time.monotonic() - began_s}


@pytest.mark.dist
def test_a_rank_that_hangs_is_lost(ranks: Ranks) -> None:
    """Who waits longer than the first who misses it is woken up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, hung = ranks(3, one_hangs, store.port)
    for found in (first, second):
        assert found["results"] == [[0, 1, 2], [0, 1]]
        assert "rank 2 on here: does not answer" in found["told"][0][2]
        assert found["took_s"] < 30
    assert hung["ended"].endswith("the others go on without it, as its replica is lost")


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


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lost", "least", "why"),
    [
        (2, 3, "; replicas left: 2, fewer than elastic.min_replicas = 3"),
        (0, 1, "; replica 0, which is lost, writes the run's folder: the others do not go on"),
    ],
)
def test_below_the_least_or_without_rank_0_the_failure_is_raised(
    ranks: Ranks, lost: int, least: int, why: str
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = ranks(3, too_few_are_left, store.port, lost, least)
    assert all(text.endswith(why) for rank, text in enumerate(said) if rank != lost), said


def nobody_was_lost(rank: int, port: int) -> str:
    store = TCPStore("127.0.0.1", port, is_master=False)
    gloo_backend.PORTS["control"] = 1
    transport = GlooTransport(1, 2, timeout_s=60)
    run: Any = Recorder(transport)
    elastic = Elastic(store, transport, run, host="here", least=1, wait_s=60, patience_s=5)

    def fail() -> None:
        raise TransportError("an edge")

    with pytest.raises(TransportError, match="an edge") as raised:
        elastic.together(fail)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.dist
def test_a_failure_without_a_loss_is_raised(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks(2, nobody_was_lost, store.port) == ["an edge"] * 2


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


@pytest.mark.dist
def test_a_rank_that_is_lost_in_the_middle_of_a_message(ranks: Ranks) -> None:
    """gloo leaves who sends waiting."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, _ = ranks(3, killed_in_a_message, store.port)
    for found in (first, second):
        assert found["results"] == [2]
        assert found["took_s"] < 30
