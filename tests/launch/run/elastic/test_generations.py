"""A run loses replicas and goes on, in the same processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from torch.distributed import HashStore

from tests.processes import lives, named
from tests.training import config
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.config.sections import CheckpointConfig
from thinpipe.launch.data.sampler import Change, EpochSampler
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.ranks.failures import Losses
from thinpipe.launch.net.ranks.network import HOLDS
from thinpipe.launch.run.elastic import hosts
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.training import Training
from thinpipe.launch.view.report.journal import Told
from thinpipe.launch.view.report.metrics import read_metrics

SAMPLES, EPOCHS = 240, 2
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
            [*command(path), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

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
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
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
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


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
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}
    assert run.summary["final_loss"] < run.summary["first_loss"] - 1


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
    assert run.summary["samples"] == {"1": SAMPLES, "2": SAMPLES}


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
            {"gradcomp": {"method": "demo"}},
            "powersgd, sparse_loco, topk, with delayed = false, or remove",
        ),
        (
            {"gradcomp": {"method": "ef_gradients", "ef_gradients": {"delayed": True}}},
            "allreduce, async_average, bytegrad, diloco, ef_gradients, powersgd",
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
