"""Saves and restores of several machines, each with a disk of its own."""

import contextlib
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.disk import full_disk
from tests.ranks import run_ranks
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.choice import CheckpointChoice
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.transaction import Place, Save, Transaction
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.pipeline.comm.gloo import GlooTransport

pytestmark = pytest.mark.dist


class Machine:
    """A machine with one rank and a disk of its own."""

    def __init__(self, rank: int, folder: str, count: int) -> None:
        self.rank, self.root = rank, Path(folder) / str(rank)
        self.transport = GlooTransport(count, 1, timeout_s=120)
        self.peers = self.transport.peers("world")
        self.place = Place(self.root, f"rank-{rank}", rank, tuple(range(count)))
        self.serial = 0

    def gather(self, value: Any) -> list[Any]:
        return gather_json(self.transport, value)

    def save(self, step: int, *, run: int = 1, keep: int = 9, copies: int = 1) -> str | None:
        self.serial += 1
        what = Save(step, run, self.serial, {"config": "abc"}, keep, copies)
        state = {"w": torch.full((5000,), float(step * 10 + self.rank)), "run": run}
        return Transaction(self.place, what, self.gather, self.peers).run(state)

    def restore(self, step: int | None = None) -> tuple[Any, ...] | str:
        """Step, run and rejected steps, or the error; `repaired`: what second copies replaced."""
        choice = CheckpointChoice(self.place, self.gather, lambda: self.peers)
        try:
            chosen = choice.newest(step, lambda *_: [self.place.part])
        except CheckpointError as error:
            return str(error)
        self.repaired = chosen.repaired
        state = files.read_part(chosen.folder, self.place.part)
        weight = float(state["w"][0])
        assert weight == chosen.manifest.step * 10 + self.rank
        return chosen.manifest.step, state["run"], chosen.rejected

    def part(self, step: int) -> Path:
        return self.root / f"step-{step}" / f"{self.place.part}.safetensors"


Scenario = Callable[[Machine], Any]


def _run(rank: int, folder: str, count: int, scenarios: Sequence[Scenario]) -> list[Any]:
    return [
        scenario(Machine(rank, f"{folder}/{scenario.__name__}", count)) for scenario in scenarios
    ]


Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By scenario, what each of two machines has found."""
    two = [_pruned_apart, _mixed_runs, _older_model, _full_disk, _at_random, _out_of_step]
    both = run_ranks(2, _run, str(tmp_path_factory.mktemp("machines")), 2, two)
    return {one.__name__: list(found) for one, *found in zip(two, *both, strict=True)}


def _pruned_apart(machine: Machine) -> Any:
    """With keep = 1, machine 1 is killed before it publishes step 20."""
    machine.save(10, keep=1)
    real = files.publish
    if machine.rank == 1:
        files.publish = lambda *_: (_ for _ in ()).throw(OSError(5, "killed here"))  # type: ignore[assignment]
    problem = machine.save(20, keep=1)
    files.publish = real
    left = files.steps(machine.root)
    return problem, left, machine.restore(), files.steps(machine.root)


def test_nothing_is_pruned_and_the_step_is_completed_if_a_machine_did_not_publish(
    outcomes: Outcomes,
) -> None:
    results = outcomes[_pruned_apart.__name__]
    problem = "/_pruned_apart/1: killed here; the disk or its connection fails"
    assert all(result[0].startswith("rank 1: ") for result in results)
    assert all(problem in result[0] for result in results)
    assert [result[1] for result in results] == [[10, 20], [10]]
    assert [result[2][:2] for result in results] == [(20, 1)] * 2
    assert [result[3] for result in results] == [[10, 20]] * 2


def _mixed_runs(machine: Machine) -> Any:
    shutil.rmtree(machine.root, ignore_errors=True)
    machine.save(10, run=1)
    machine.save(20, run=1)
    if machine.rank == 1:
        shutil.copytree(machine.root, f"{machine.root}.old")
    shutil.rmtree(machine.root / "step-20")
    machine.serial = 1
    machine.save(20, run=2)
    if machine.rank == 1:  # the other run's step comes back
        shutil.rmtree(machine.root / "step-20")
        shutil.copytree(f"{machine.root}.old/step-20", machine.root / "step-20")
    passed_over, rejected = machine.restore(), machine.restore(20)
    older = machine.root / "step-10"
    if machine.rank == 1:
        shutil.rmtree(older)
    return passed_over, rejected, machine.restore()


def test_parts_of_different_saves_are_never_joined(outcomes: Outcomes) -> None:
    for passed_over, rejected, nothing in outcomes[_mixed_runs.__name__]:
        assert passed_over[:2] == (10, 1)
        names = (f"{1:016x}", f"{2:016x}")
        assert "step-20 cannot be used: parts of different saves" in passed_over[2][0]
        assert all(name in passed_over[2][0] for name in names)
        assert rejected.startswith("step-20 cannot be used: parts of different saves: rank ")
        assert "no step is whole: step-20 cannot be used: parts of different" in nothing
        assert "step-10/rank-1.safetensors: missing" in nothing


def _older_model(machine: Machine) -> Any:
    for step in (10, 20):
        machine.save(step)
    if machine.rank == 1:  # all of it, manifest included, under the newer name
        shutil.rmtree(machine.root / "step-20")
        shutil.copytree(machine.root / "step-10", machine.root / "step-20")
    return machine.restore()


def test_an_older_model_under_a_newer_name_is_not_taken(outcomes: Outcomes) -> None:
    for step, _, rejected in outcomes[_older_model.__name__]:
        assert step == 10
        assert "is that of step 10; the folder was renamed" in " ".join(rejected)


def _burnt_disk(machine: Machine) -> Any:
    for step in (10, 20):
        assert machine.save(step, copies=2) is None
    with machine.part(20).open("r+b") as file:  # a bit of each machine's own part
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    if machine.rank == 0:
        (machine.root / "step-20" / "manifest.json").write_text("{")
    healed = (*machine.restore(), machine.repaired)
    if machine.rank == 1:
        shutil.rmtree(machine.root)
    restored = machine.restore()
    return healed, restored, sorted(path.name for path in (machine.root / "step-20").iterdir())


def test_second_copies_replace_a_burnt_disk_and_damaged_parts(tmp_path: Path) -> None:
    results = [found for (found,) in run_ranks(3, _run, str(tmp_path), 3, [_burnt_disk])]
    for rank, (healed, restored, names) in enumerate(results):
        assert healed[:2] == restored[:2] == (20, 1), (healed, restored)
        repaired = healed[-1]
        assert [text.partition(":")[0] for text in repaired] == ["rank 0", "rank 1", "rank 2"]
        assert all("sha256" in text for text in repaired[1:]), repaired
        assert {f"rank-{rank}.safetensors", "manifest.json"} <= set(names)


def _full_disk(machine: Machine) -> Any:
    machine.save(10)
    with full_disk() if machine.rank == 1 else contextlib.nullcontext():
        problem = machine.save(20)
    leftovers = [path.name for path in machine.root.iterdir() if path.name.startswith(".")]
    return problem, leftovers, machine.save(30), machine.restore()


def test_a_full_disk_on_one_machine_costs_that_step_on_all(outcomes: Outcomes) -> None:
    for problem, leftovers, again, restored in outcomes[_full_disk.__name__]:
        assert problem.startswith("rank 1: ")
        assert "`ulimit -f` allows 4,096 bytes; raise it" in problem
        assert leftovers == []
        assert again is None
        assert restored[:2] == (30, 1)


def _at_random(machine: Machine) -> Any:
    """Damage single files of the newest two steps in 40 ways; what was saved is restored."""
    for step in (10, 20, 30):
        machine.save(step)
    whole = f"{machine.root}.whole"
    shutil.copytree(machine.root, whole)
    outcomes = []
    for seed in range(40):
        chance = random.Random(seed)
        victims = [(chance.randrange(2), chance.choice((20, 30, 30))) for _ in range(2)]
        for rank, step in victims:
            what, where = chance.choice(("flip", "cut", "lose", "empty")), chance.random()
            name = chance.choice((f"rank-{rank}.safetensors", "manifest.json", "../latest"))
            if rank == machine.rank:
                _damage(machine.root / f"step-{step}" / name, what, where)
        outcomes.append(machine.restore())
        shutil.rmtree(machine.root)
        shutil.copytree(whole, machine.root)
    return outcomes


def _damage(path: Path, what: str, where: float) -> None:
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    match what:
        case "flip" if data:
            data[int(where * len(data))] ^= 1
        case "cut":
            del data[int(where * len(data)) :]
        case "empty":
            data = bytearray()
    path.unlink() if what == "lose" else path.write_bytes(data)


def test_whatever_is_damaged_the_newest_whole_step_is_restored_on_all(outcomes: Outcomes) -> None:
    found = outcomes[_at_random.__name__]
    for mine, other in zip(*found, strict=True):
        assert mine[:2] == other[:2], (mine, other)
        step, _, rejected = mine
        assert step in (10, 20, 30)
        if step < 30:  # machine 0 warns
            assert f"step-{step + 10}" in " ".join(rejected)
    assert {outcome[0] for outcome in found[0]} == {10, 20, 30}


def _out_of_step(machine: Machine) -> Any:
    """Machine 1 has passed step 10 when machine 0 saves it."""
    steps = (10, 20, 30) if machine.rank == 0 else (20, 30)
    problems = {step: machine.save(step) for step in steps}
    return problems, files.steps(machine.root), machine.restore()


def test_a_checkpoint_is_of_one_step(outcomes: Outcomes) -> None:
    behind, ahead = outcomes[_out_of_step.__name__]
    assert behind[0].pop(10) == (
        "rank 1 saves step 20 and not step 10, as a rank was lost in between"
    )
    assert behind[0] == ahead[0] == {20: None, 30: None}
    for _, left, restored in (behind, ahead):
        assert left == [20, 30]
        assert restored == (30, 1, ())
