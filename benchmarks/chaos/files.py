"""Files of checkpoints damaged, missing and mixed: whole states are restored, others refused.

Two machines with disks of their own are two threads here: restoring only reads and writes files.
"""

import json
import random
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.outcome import Outcome
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.choice import Choice
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.transaction import Place, Save, Transaction
from thinpipe.pipeline.comm.transport import Peers

MACHINES = 2
STEPS = (10, 20, 30)
RUN, OTHER_RUN = 1, 2


class Together:
    """Runs a function as every machine, each in a thread."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(MACHINES)
        self._values: dict[int, str] = {}

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every machine's value."""
        self._values[rank] = json.dumps(value)
        self._barrier.wait(60)
        found = [json.loads(self._values[other]) for other in range(MACHINES)]
        self._barrier.wait(60)
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """The results, by machine."""
        results: dict[int, Any] = {}

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(MACHINES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(MACHINES)]


def inject(folder: Path, count: int, seed: int) -> list[Outcome]:
    """Damage files in `count` ways; each time from the same two machines' checkpoints."""
    together = Together()
    for run in (RUN, OTHER_RUN):
        for step in STEPS:
            together.run(partial(_save, together, folder, step, run))
        folder.joinpath("now").rename(folder / f"run{run}")
    outcomes = []
    for number in range(count):
        shutil.rmtree(folder / "now", ignore_errors=True)
        shutil.copytree(folder / f"run{RUN}", folder / "now")
        chance = random.Random(seed * 1_000_003 + number)
        kinds = [_damage(folder, chance) for _ in range(chance.choice((1, 1, 1, 2, 3, 6)))]
        whole = _whole_steps(folder)
        found = together.run(lambda rank: _restore(together, folder, rank))
        outcomes.append(_judge(kinds[0] if len(kinds) == 1 else "several of these", found, whole))
    return outcomes


def _place(folder: Path, rank: int) -> Place:
    return Place(folder / "now" / str(rank), f"rank-{rank}", rank, tuple(range(MACHINES)))


def _state(run: int, step: int, rank: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(1000 * run + 10 * step + rank)), "run": run}


def _save(together: Together, folder: Path, step: int, run: int, rank: int) -> None:
    save = Save(step, run, step, {"config": "abc"}, keep=9)
    gather = partial(together.gather, rank)
    problem = Transaction(_place(folder, rank), save, gather, None).run(_state(run, step, rank))
    assert problem is None, problem


def _no_peers() -> Peers:
    raise AssertionError("no other machine holds a copy")


def _restore(together: Together, folder: Path, rank: int) -> tuple[int, bool] | str:
    """Step, and whether the state is what was saved; or the error."""
    place = _place(folder, rank)
    choice = Choice(place, partial(together.gather, rank), _no_peers)
    try:
        chosen = choice.newest(None, lambda _: [place.part])
    except CheckpointError as error:
        return str(error)
    state = files.read_part(chosen.folder, place.part)
    expected = _state(RUN, chosen.manifest.step, rank)
    right = state["run"] == RUN and torch.equal(state["w"], expected["w"])
    return chosen.manifest.step, right


def _damage(folder: Path, chance: random.Random) -> str:
    rank, step = chance.randrange(MACHINES), chance.choice(STEPS)
    root = folder / "now" / str(rank)
    kind = chance.choice(
        ("bit", "truncated", "missing", "empty", "longer", "older part", "older step", "other run")
    )
    name = chance.choice((f"rank-{rank}.safetensors", f"rank-{rank}.safetensors", "manifest.json"))
    path = root / f"step-{step}" / name
    if kind == "older step":  # under the newer name
        shutil.rmtree(root / "step-30", ignore_errors=True)
        shutil.copytree(folder / f"run{RUN}" / str(rank) / "step-10", root / "step-30")
    elif kind == "other run":  # on one machine only: on both it would be whole again
        rank, root = 0, folder / "now" / "0"
        shutil.rmtree(root / f"step-{step}", ignore_errors=True)
        other = folder / f"run{OTHER_RUN}" / str(rank) / f"step-{step}"
        shutil.copytree(other, root / f"step-{step}")
    elif path.exists():
        _change(path, kind, chance, older=folder / f"run{RUN}" / str(rank) / "step-10" / name)
    return kind


def _change(path: Path, kind: str, chance: random.Random, *, older: Path) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "bit" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "truncated":
        del data[chance.randrange(len(data) + 1) :]
    elif kind == "empty":
        data = bytearray()
    elif kind == "longer":
        data += b"\0"
    elif kind == "older part":
        data = bytearray(older.read_bytes())
    path.write_bytes(data)


def _whole_steps(folder: Path) -> list[int]:
    """Steps of which no machine's file was touched."""
    return [
        step
        for step in STEPS
        if all(
            _same(folder / f"run{RUN}" / str(rank) / f"step-{step}", folder, rank, step)
            for rank in range(MACHINES)
        )
    ]


def _same(before: Path, folder: Path, rank: int, step: int) -> bool:
    now = folder / "now" / str(rank) / f"step-{step}"
    names = [f"rank-{rank}.safetensors", "manifest.json"]
    return all(
        (now / name).exists() and (now / name).read_bytes() == (before / name).read_bytes()
        for name in names
    )


def _judge(kind: str, found: list[Any], whole: list[int]) -> Outcome:
    if any(isinstance(result, str) for result in found):
        if whole:
            return Outcome(f"file: {kind}", "lost", f"{whole} were whole, but: {found}")
        return Outcome(f"file: {kind}", "refused", str(found[0]))
    steps = {step for step, _ in found}
    if len(steps) > 1 or not all(right for _, right in found):
        return Outcome(f"file: {kind}", "silent", str(found))
    (step,) = steps
    if whole and step < max(whole):
        return Outcome(f"file: {kind}", "lost", f"step {max(whole)} was whole, {step} was taken")
    return Outcome(f"file: {kind}", "survived", f"step {step}")
