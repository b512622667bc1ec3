"""Whatever starts a run asks the same questions first."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.commands import run
from tests.texts import write_squares
from tests.training import config as made
from thinpipe.launch import preflight
from thinpipe.launch.checkpoint.resume import Resume
from thinpipe.launch.config.cli_options import Machines
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.memory.host import host_needs
from thinpipe.launch.memory.model import ModelMemory, rank_memory
from thinpipe.launch.net.ranks.group import Newcomer, tell_needs
from thinpipe.launch.run.run import _check_room
from thinpipe.launch.start import _check, _shares_of_newcomer

MISTAKES = {
    "folder": (["run.folder={file}"], "run.folder = "),
    "other files": (["run.folder={folder}"], "holds files that are not a run's"),
    "writers": (['report.writers=["trackio"]'], 'report.writers has "trackio": '),
    "from_run": (["model.from_run={folder}/none"], "model.from_run = "),
    "optimizer": (["train.optimizer=adamx"], 'train.optimizer = "adamx": no such optimizer'),
    "own optimizer": (["train.optimizer=torch:sdg"], "torch has no sdg"),
    "its parameters": (["train.optimizer=textwrap:dedent"], "cannot be called as dedent(named"),
    "two optimizers": (
        ["train.optimizer=muon", "gradcomp.method=qadam"],
        'gradcomp.method = "qadam" brings its own optimizer along',
    ),
    "data": (["data.path={folder}/none.txt"], "none.txt"),
    "host": (["model.width=262144", "model.layers=64"], "do not fit: RAM"),
}
HOW = {
    "start": [],
    "dry run": ["--dry-run"],
    "several machines": ["--nnodes", "2", "--rdzv", "127.0.0.1:1"],
    "a spare": ["--join", "127.0.0.1:1", "--set", "checkpoint.ram_every=5"],
    "a part of a replica": [
        *("--join", "127.0.0.1:1", "--ranks", "1"),
        *("--set", "elastic.min_replicas=1", "--set", "pipeline.replicas=2"),
    ],
}
for _name in ("a spare", "a part of a replica"):
    HOW[_name] += ["--set", "pipeline.cuts=[1]"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    text, path = write_squares(tmp_path / "text.txt", 1000), tmp_path / "run.toml"
    sizes = {"path": str(text), "train_sequences": 24, "eval_sequences": 8}
    write_config(made(data=sizes, run={"folder": str(tmp_path / "run")}), path)
    return path


@pytest.mark.parametrize(
    ("mistake", "how"),
    [
        *((mistake, "start") for mistake in MISTAKES),
        *((mistake, "dry run") for mistake in ("data", "host", "other files")),
        *((mistake, "several machines") for mistake in ("folder", "optimizer", "other files")),
        *(("host", how) for how in ("a spare", "a part of a replica")),
    ],
)
def test_each_start_rejects_what_cannot_start(run_file: Path, mistake: str, how: str) -> None:
    settings, message = MISTAKES[mistake]
    places = {"file": run_file, "folder": run_file.parent}
    words = [word for text in settings for word in ("--set", text.format(**places))]
    done = run("train", run_file, *HOW[how], *words, code=2)
    assert message in done.stderr
    assert "starting" not in done.stdout
    assert not (run_file.parent / "run").exists()


def shares(run: RunConfig, machines: int, ranks: int | None = None) -> list[list[int]]:
    return [[*share] for share in preflight.shares_here(run, machines, ranks)]


def test_shares_are_those_that_this_machine_may_have() -> None:
    run = made(pipeline={"cuts": [1, 2, 3], "replicas": 2})
    assert shares(run, 1) == [[*range(8)]]
    assert shares(run, 4) == [[0, 1], [2, 3]]  # the other replica's need the same
    assert shares(run, 7, 2) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    hosts = [["a", "b", "b", "a"], ["c"] * 4]
    placed = {"cuts": [1, 2, 3], "replicas": 2, "placement": hosts}
    assert shares(made(pipeline=placed, network={"name": "b"}), 3) == [[1, 2]]
    assert shares(made(pipeline=placed, network={"name": "x"}), 3) == [[0, 3], [1, 2], [4, 5, 6, 7]]
    with pytest.raises(ConfigError, match=r"--ranks = 1: pipeline\.placement gives this machine 2"):
        shares(made(pipeline=placed, network={"name": "b"}), 3, 1)


def test_of_several_machines_one_need_not_have_checkpoints_or_writers(run_file: Path) -> None:
    """Another may have them; for one alone both are rejected."""
    run = made(data={"path": str(run_file.parent / "text.txt"), "train_sequences": 24})
    write = run.report.model_copy(update={"writers": ("trackio",)})
    run = run.model_copy(update={"report": write})
    ready = preflight.check_settings(run, [range(1), range(1, 2)], resume=True)
    assert len(ready.corpus.train) == 24
    with pytest.raises(ValueError, match="trackio"):
        preflight.check_settings(run, [range(2)], resume=True)


def test_a_spare_may_have_each_place_but_the_first() -> None:
    run = made(pipeline={"cuts": [1, 2, 3]}, checkpoint={"ram_every": 5})
    spares = [Machines(join="host0:29500", ranks=ranks) for ranks in (None, 2, 4)]
    assert [[*share] for share in _shares_of_newcomer(run, spares[0])] == [[1], [2], [3]]
    assert [[*share] for share in _shares_of_newcomer(run, spares[1])] == [[1, 2], [2, 3]]
    with pytest.raises(ConfigError, match="--ranks = 4: with --join a machine brings 3 or fewer"):
        _shares_of_newcomer(run, spares[2])


def test_a_spare_must_have_room_for_every_place(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That with the head needs more than the others."""
    data = {"path": str(run_file.parent / "text.txt"), "train_sequences": 24}
    run = made(data=data, pipeline={"cuts": [1, 2, 3]}, checkpoint={"ram_every": 5})
    spare = Machines(join="host0:29500")
    places = _shares_of_newcomer(run, spare)
    run = preflight.check_settings(run, places).config
    needs = [host_needs(run, 24, place).total for place in places]
    assert needs[-1] > needs[0]
    monkeypatch.setattr("thinpipe.launch.memory.host.free_memory", lambda: needs[-1])
    _check(run, spare, places, Resume(False, None))
    monkeypatch.setattr("thinpipe.launch.memory.host.free_memory", lambda: needs[0])
    with pytest.raises(ConfigError, match="do not fit"):
        _check(run, spare, places, Resume(False, None))


def test_ranks_of_a_whole_replica_find_out_whether_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = made(pipeline={"cuts": [1], "replicas": 2}, elastic={"min_replicas": 1})
    monkeypatch.setattr("thinpipe.launch.run.run.joins", lambda: True)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    needed = host_needs(run, 24, [2, 3]).total
    assert needed < host_needs(run, 24, [0, 1]).total  # which reports
    store = dist.HashStore()  # type: ignore[attr-defined]
    tell_needs(store, "cpu", [asdict(needs) for needs in rank_memory(run)])
    newcomer = Newcomer(store, store, lambda _: None, lambda: None)
    session: Any = SimpleNamespace(newcomer=newcomer, local_rank=0, writes_run_folder=False)
    monkeypatch.setattr("thinpipe.launch.run.run.rank_memory", lambda _: pytest.fail("it is told"))
    monkeypatch.setattr("thinpipe.launch.memory.host.free_memory", lambda: needed)
    _check_room(run, 24, session)
    monkeypatch.setattr("thinpipe.launch.memory.host.free_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match="do not fit"):
        _check_room(run, 24, session)


@pytest.mark.parametrize(("device", "ranks"), [("cuda", 2), ("cpu", 1), ("cpu", 3), ("", 0)])
def test_a_newcomer_that_is_told_of_another_run_counts_itself(
    device: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one on another kind of device, or with other cuts, or nothing."""
    run = made(pipeline={"cuts": [1], "replicas": 2}, elastic={"min_replicas": 1})
    monkeypatch.setattr("thinpipe.launch.run.run.joins", lambda: True)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()  # type: ignore[attr-defined]
    if device:
        tell_needs(store, device, [asdict(ModelMemory())] * ranks)
    newcomer = Newcomer(store, store, lambda _: None, lambda: None)
    session: Any = SimpleNamespace(newcomer=newcomer, local_rank=0, writes_run_folder=False)
    needed = host_needs(run, 24, [2, 3]).total
    monkeypatch.setattr("thinpipe.launch.memory.host.free_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match="do not fit"):
        _check_room(run, 24, session)


def test_a_machine_that_joins_writes_nothing(run_file: Path) -> None:
    """It is rank 0 of its own replica; packages for writing are rank 0's of the run."""
    run = made(data={"path": str(run_file.parent / "text.txt"), "train_sequences": 24})
    write = run.report.model_copy(update={"writers": ("trackio",)})
    run = run.model_copy(update={"report": write})
    joins = _shares_of_newcomer(run, Machines(join="host0:29500"))
    assert len(preflight.check_settings(run, joins).corpus.train) == 24


def test_where_a_machine_joins_other_files_may_be(run_file: Path) -> None:
    """Its folder is not moved away."""
    run = made(data={"path": str(run_file.parent / "text.txt"), "train_sequences": 24})
    run = run.model_copy(update={"run": run.run.model_copy(update={"folder": run_file.parent})})
    preflight.check(run, [[0]], joins=True)
    with pytest.raises(ConfigError, match="holds files that are not a run's"):
        preflight.check(run, [[0]])
