"""Checkpoints of two machines with disks of their own: damaged, and killed while they save.

Whatever happens, both restore the same whole state, the newest that there is, or say why not.
"""

import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.faults.outcomes import Outcome, check, restored
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.choice import CheckpointChoice
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.store_gather import StoreGather
from thinpipe.launch.checkpoint.transaction import Place, Save, Transaction
from thinpipe.launch.net.ranks.store import connect_store, hold_store

MACHINES = 2
STEPS = (10, 20, 30)
RUN, OTHER_RUN = 1, 2
LIMIT_S = 60.0
Gather = Callable[[Any], list[Any]]


def _place(folder: Path, rank: int) -> Place:
    return Place(folder / str(rank), f"rank-{rank}", rank, tuple(range(MACHINES)))


def _save(place: Place, gather: Gather, step: int, *, serial: int, run: int, keep: int) -> None:
    state = {"w": torch.full((2000,), float(10 * step + place.rank)), "run": run}
    problem = Transaction(place, Save(step, run, serial, {"config": "abc"}, keep), gather, None)
    assert problem.run(state) is None


def _restore(place: Place, gather: Gather, run: int | None = None) -> tuple[int, bool] | str:
    """Step, and whether the state is what was saved; or the error."""
    try:
        chosen = CheckpointChoice(place, gather, _no_peers).newest(None, lambda *_: [place.part])
    except CheckpointError as error:
        return str(error)
    state, step = files.read_part(chosen.folder, place.part), chosen.manifest.step
    right = bool((state["w"] == 10 * step + place.rank).all()) and run in (None, state["run"])
    return step, right


def _no_peers() -> Any:
    raise AssertionError("no other machine holds a copy")


def _together(folder: Path, function: Callable[..., Any], *rest: Any, **options: Any) -> list[Any]:
    """The results of `function(place, gather, ...)`, by machine, each in a thread."""
    store = HashStore()

    def call(rank: int) -> Any:
        gather = StoreGather(store, rank, MACHINES, name="", limit_s=LIMIT_S).gather
        return function(_place(folder, rank), gather, *rest, **options)

    with ThreadPoolExecutor(MACHINES) as machines:
        return list(machines.map(call, range(MACHINES)))


def _damage(folder: Path, chance: random.Random) -> str:
    """Something happens to a file, or to a folder of a step; its kind."""
    rank, step = chance.randrange(MACHINES), chance.choice(STEPS)
    kinds = ("bit", "truncated", "missing", "empty", "longer", "older part", "older step", "mixed")
    kind, root = chance.choice(kinds), folder / "now" / str(rank)
    name = chance.choice((f"rank-{rank}.safetensors", f"rank-{rank}.safetensors", "manifest.json"))
    path = root / f"step-{step}" / name
    if kind == "older step":  # under the newer name
        shutil.rmtree(root / "step-30", ignore_errors=True)
        shutil.copytree(folder / f"run{RUN}" / str(rank) / "step-10", root / "step-30")
    elif kind == "mixed":  # another run, on one machine only: on both it would be whole again
        root = folder / "now" / "0"
        shutil.rmtree(root / f"step-{step}", ignore_errors=True)
        shutil.copytree(folder / f"run{OTHER_RUN}" / "0" / f"step-{step}", root / f"step-{step}")
    elif path.exists():
        _change(path, kind, chance, older=folder / f"run{RUN}" / str(rank) / "step-10" / name)
    return kind


def _change(path: Path, kind: str, chance: random.Random, *, older: Path) -> None:
    data = bytearray(path.read_bytes())
    match kind:
        case "bit" if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case "truncated":
            del data[chance.randrange(len(data) + 1) :]
        case "empty":
            data = bytearray()
        case "longer":
            data += b"\0"
        case "older part":
            data = bytearray(older.read_bytes())
    path.unlink() if kind == "missing" else path.write_bytes(data)


def _whole(folder: Path) -> int:
    """The newest step of which no machine's file was touched."""

    def content(run: str, step: int) -> list[bytes | None]:
        folders = [folder / run / str(rank) / f"step-{step}" for rank in range(MACHINES)]
        names = [(f"rank-{rank}.safetensors", "manifest.json") for rank in range(MACHINES)]
        paths = [at / name for at, both in zip(folders, names, strict=True) for name in both]
        return [path.read_bytes() if path.exists() else None for path in paths]

    return max((s for s in STEPS if content("now", s) == content(f"run{RUN}", s)), default=0)


def damaged(folder: Path, count: int, seed: int) -> list[Outcome]:
    """Damage files in `count` ways; each time from the same two machines' checkpoints."""
    outcomes, now = [], folder / "now"
    for run in (RUN, OTHER_RUN):
        for step in STEPS:
            _together(now, _save, step, serial=step, run=run, keep=9)
        now.rename(folder / f"run{run}")
    for number in range(count):
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(folder / f"run{RUN}", now)
        chance = random.Random(seed * 1_000_003 + number)
        kinds = [_damage(folder, chance) for _ in range(chance.choice((1, 1, 1, 2, 3, 6)))]
        newest = _whole(folder)
        found = _together(now, _restore, RUN)
        kind = kinds[0] if len(kinds) == 1 else "several of these"
        outcomes.append(restored(f"file: {kind}", found, newest))
    return outcomes


def test_damaged_missing_and_mixed_files(tmp_path: Path, option: Callable[[str], int]) -> None:
    check(damaged(tmp_path, option("file-faults"), option("fault-seed")))


def _board(port: int, rank: int, name: str) -> Gather:
    store = connect_store(("127.0.0.1", port), wait_s=LIMIT_S)
    return StoreGather(store, rank, MACHINES, name=name, limit_s=LIMIT_S).gather


def _save_on(rank: int, folder: Path, port: int, number: int, at: int, pipe: Connection) -> None:
    """Save until killed: before file operation `at` of the second save, unless that is -1."""
    gather, place = _board(port, rank, f"save{number}"), _place(folder, rank)
    place.root.mkdir(parents=True, exist_ok=True)
    serials = [offer.serial for offer in files.offers(place.root)]
    first = max(found or 0 for found in gather(max(serials, default=0))) + 1
    _save(place, gather, first, serial=first, run=number, keep=1)
    pipe.send("begins")
    if at >= 0:
        _die_before_operation(at)
    while True:
        first += 1
        _save(place, gather, first, serial=first, run=number, keep=1)


def _die_before_operation(at: int) -> None:
    """Kill this process before its `at`-th flush, rename or removal."""
    left = at

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*arguments, **options)

        return call

    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name)))


def _restore_on(rank: int, folder: Path, port: int, number: int, _: int, pipe: Connection) -> None:
    pipe.send(_restore(_place(folder, rank), _board(port, rank, f"restore{number}")))


def killed(folder: Path, count: int, seed: int) -> list[Outcome]:
    """Kill a machine `count` times while both save: at each boundary first, then at random."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    store = hold_store(server, wait_s=LIMIT_S)
    chance, outcomes = random.Random(seed), []

    def start(function: Callable[..., None], number: int, victim: int, at: int) -> Any:
        pipes = [context.Pipe() for _ in range(MACHINES)]
        workers = [
            context.Process(
                target=function,
                args=(rank, folder, port, number, at if rank == victim else -1, pipe[1]),
            )
            for rank, pipe in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        return workers, [pipe[0] for pipe in pipes]

    for number in range(count):
        rank, at = number % MACHINES, number // MACHINES if number < count // 2 else -1
        workers, pipes = start(_save_on, number, rank, at)
        assert pipes[rank].poll(LIMIT_S), "a machine does not start"
        if at < 0:
            time.sleep(chance.random() * 0.3)
            workers[rank].kill()
        workers[rank].join(LIMIT_S)
        time.sleep(0.05)
        for worker in workers:  # as the others' watch does
            worker.kill()
            worker.join()
        steps = [set(files.steps(folder / str(machine))) for machine in range(MACHINES)]
        published = max(set.intersection(*steps), default=0)
        workers, pipes = start(_restore_on, number, rank, -1)
        found = [pipe.recv() if pipe.poll(LIMIT_S) else "no answer" for pipe in pipes]
        for worker in workers:
            worker.join(LIMIT_S)
        kind = "killed at a boundary of a save" if at >= 0 else "killed at random"
        outcomes.append(restored(kind, found, published))
    del store
    return outcomes


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(0)
def test_machines_killed_while_they_save(tmp_path: Path, option: Callable[[str], int]) -> None:
    outcomes = killed(tmp_path, option("kill-faults"), option("fault-seed"))
    check(outcomes)
    assert {outcome.verdict for outcome in outcomes} == {"survived"}
