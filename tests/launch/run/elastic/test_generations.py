"""A run loses replicas and goes on, in the same processes."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from torch.distributed import HashStore

from tests.launch.run.elastic.launchers import EPOCHS, SAMPLES, TWO_BY_TWO, Launchers
from tests.training import config
from tests.waiting import PATIENCE_S
from thinpipe.launch.config.sections import CheckpointConfig
from thinpipe.launch.data.sampler import Change, EpochSampler
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.ranks.failures import LOST, Losses
from thinpipe.launch.net.ranks.network import HOLDS
from thinpipe.launch.run.elastic import hosts
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.training import Training
from thinpipe.launch.view.report.journal import Told
from thinpipe.launch.view.report.metrics import read_metrics


@pytest.mark.slow
def test_a_run_goes_on_without_replicas_that_are_killed(tmp_path: Path) -> None:
    run = Launchers(tmp_path, count=1)
    run.kill_rank(2, after=8)
    run.kill_rank(1, after=30)
    assert run.done() == [0], run.said()
    assert "lost: rank 2" in run.said()
    assert "samples go to 2 replicas in place of 3" in run.said()
    assert "samples go to 1 replica in place of 2" in run.said()
    records = read_metrics(run.run_folder / "metrics.jsonl")
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
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
    told = Told(run.run_folder)
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
def test_it_goes_on_without_a_replica_that_stands_still(tmp_path: Path) -> None:
    run = Launchers(tmp_path, "network.patience_s=3", count=1)
    run.kill_rank(2, after=8, by=signal.SIGSTOP)
    assert run.done() == [0], run.said()
    assert "rank 2 on" in run.said()
    assert "no sign of life for 3 s (network.patience_s); from step" in run.said()
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


@pytest.mark.slow
def test_a_replica_of_two_stages_leaves_as_a_whole(tmp_path: Path) -> None:
    run = Launchers(tmp_path, *TWO_BY_TWO, count=1)
    run.kill_rank(3, after=12)
    assert run.done() == [0], run.said()
    assert "lost: rank 3" in run.said()
    assert "rank 2: the others go on without it, as its replica is lost" in run.said()
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
    assert run.summary["final_loss"] < run.summary["first_loss"] - 1


@pytest.mark.slow
def test_a_rank_of_another_replica_completes_the_first(tmp_path: Path) -> None:
    run = Launchers(tmp_path, *TWO_BY_TWO, count=1)
    run.kill_rank(1, after=12)
    assert run.done() == [0], run.said()
    assert "lost: rank 1" in run.said()
    assert "; ranks 0, 3 are a replica now; from step" in run.said()
    assert "rank 2: the others go on without it, as its replica is lost" in run.said()
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
    assert run.summary["final_loss"] < run.summary["first_loss"] - 1


@pytest.mark.slow
def test_a_machine_of_the_first_replica_may_leave(tmp_path: Path) -> None:
    run = Launchers(tmp_path, *TWO_BY_TWO, count=4, apart=True)
    run.wait_for_step(8)
    own = run.launchers[run.number_of(1)]
    own.send_signal(signal.SIGTERM)
    assert own.wait(PATIENCE_S) == 128 + signal.SIGTERM
    said = [run.said(number) for number in range(4)]
    assert sorted(run.done()) == [0, 0, LOST, 128 + signal.SIGTERM], said
    assert any("; ranks 0, 3 are a replica now" in text for text in said)
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [2, 3])
def test_a_machine_that_is_out_of_the_run_keeps_its_store(tmp_path: Path, lost: int) -> None:
    """Where its own rank is lost, or is left over."""
    run = Launchers(tmp_path, *TWO_BY_TWO, count=4, apart=True, store_last=True)
    run.kill_rank(lost, after=8)
    assert run.done() == [LOST, LOST, 0, 0], [run.said(n) for n in range(4)]
    assert "this command stays until the run has ended" in run.said(0)
    assert f"lost: rank {lost} on" in run.said(3)
    assert ("left over: 2; from step" in run.said(3)) == (lost == 3)
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


@pytest.mark.slow
def test_all_machines_of_a_replica_may_leave(tmp_path: Path) -> None:
    """At once, or one after the other."""
    run = Launchers(tmp_path, *TWO_BY_TWO, count=4, apart=True)
    run.wait_for_step(8)
    owners = [run.launchers[run.number_of(rank)] for rank in (2, 3)]
    for own in owners:
        own.send_signal(signal.SIGTERM)
    assert [own.wait(PATIENCE_S) for own in owners] == [128 + signal.SIGTERM] * 2
    said = [run.said(number) for number in range(4)]
    assert sorted(run.done()) == [0, 0, *[128 + signal.SIGTERM] * 2], said
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize(("by", "code"), [(signal.SIGKILL, LOST), (signal.SIGTERM, 128 + 15)])
def test_launchers_on_one_machine_end_without_those_that_left(
    tmp_path: Path, by: int, code: int
) -> None:
    """Without a relay nobody else says who is there."""
    run = Launchers(tmp_path, apart=True)
    if by == signal.SIGKILL:
        run.kill_rank(2, after=8)
    else:
        run.wait_for_step(8)
        run.launchers[2].send_signal(by)
    assert sorted(run.done()) == [0, 0, code], run.said()


@pytest.mark.slow
def test_what_is_left_can_be_resumed_by_all_replicas(tmp_path: Path) -> None:
    run = Launchers(tmp_path, count=1, method="allreduce")
    run.kill_rank(1, after=12)
    assert run.done() == [0]
    assert run.start(1, "--resume", "--step", "30").wait(PATIENCE_S) == 0, run.said(1)
    assert "samples go to 3 replicas in place of 2" in run.said(1)
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


@pytest.mark.slow
def test_below_the_least_it_ends_as_before(tmp_path: Path) -> None:
    run = Launchers(tmp_path, "elastic.min_replicas=2", count=1, method="allreduce")
    run.kill_rank(2, after=5)
    run.kill_rank(1, after=18)
    assert run.done() == [1], run.said()
    assert "replicas left: 1, fewer than elastic.min_replicas = 2" in run.said()
    assert "rank 1 on " in run.said()
    assert "continue from there with --resume" in run.said()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"gradcomp": {"method": "decentralized"}},
            'gradcomp.method = "decentralized": its replicas cannot go on without one yet '
            r"\(elastic.min_replicas = 1\); use allreduce, async_average, bytegrad, cocktail, demo",
        ),
        (
            {"gradcomp": {"method": "cocktail", "cocktail": {"delayed": False}}},
            "set gradcomp.cocktail.delayed = true, or remove",
        ),
        ({"elastic": {"min_replicas": 3}}, r"there are 2 \(pipeline.replicas\)"),
    ],
)
def test_what_cannot_go_on_is_rejected_by_name(sections: dict[str, Any], message: str) -> None:
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
    ("own", "done", "expected"),
    [(True, 0, True), (True, 1, False), (True, 2, True), (False, 1, True)],
)
def test_one_more_replica_needs_a_sample_of_the_epoch(own: bool, done: int, expected: bool) -> None:
    """Two replicas, five samples, two in a step; where there are masks, one may be had twice."""
    sampler = EpochSampler(5, batch_size=2, replicas=2, replica=0, seed=0, masks=not own)
    training: Any = SimpleNamespace(
        _sampler=sampler,
        done=done,
        _epoch=sampler.epoch(done),
        _config=SimpleNamespace(model=SimpleNamespace(is_own=own)),
        _session=SimpleNamespace(mesh=SimpleNamespace(replicas=2)),
    )
    assert ElasticTraining._has_samples_for_more(training) == expected


def test_a_machine_that_cannot_be_reached_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which the others are told of it."""

    def reach(*_: Any) -> None:
        raise OverlayError("its port is taken here")

    monkeypatch.setattr(hosts, "reach", reach)
    store = HashStore()
    store.set("hosts/3", json.dumps(["b", False, 1, {}, 3]))
    found = hosts.Hosts(store, 0, "a")
    with pytest.raises(OverlayError):
        found.now([0, 3])
    assert found.of_all([3]) == {"b"}


@pytest.mark.parametrize(
    ("rank", "needed", "reported"),
    [(0, True, [2, 4]), (2, False, [4]), (3, True, [0, 1, 2, 4]), (4, False, [])],
)
def test_whose_word_counts_of_which_machine(
    rank: int, needed: bool, reported: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines a (ranks 0 and 1), b (2), c (3, with the store) and d (4) lose all others."""
    names = ["a", "a", "b", "c", "d"]
    monkeypatch.setenv(HOLDS, str(int(names[rank] == "c")))
    store = HashStore()
    for other, name in enumerate(names):
        store.set(f"hosts/{other}", json.dumps([name, name == "c", None, {}, other]))
    found, losses = hosts.Hosts(store, rank, names[rank]), Losses(store)
    found.now(range(5))
    others = sorted({*names} - {names[rank]})
    for _ in range(2):
        found.report(others, losses)
    assert found.is_needed == needed
    assert [other for other in range(5) if losses.has(other)] == reported
    for number in range(1, len(reported) + 1):
        assert losses.wait(number)[1].endswith(": its machine is gone")
