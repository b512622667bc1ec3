"""Machines killed while they save: at every boundary of the two phases, and at random moments.

Two machines with disks of their own are two processes here, which meet in a store. After each kill
both are started again, as a restart does, and must restore the same, newest published state.
"""

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.outcome import Outcome
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.board import Board
from thinpipe.launch.checkpoint.choice import Choice
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.transaction import Place, Save, Transaction
from thinpipe.launch.distributed.store import connect_store, hold_store

MACHINES = 2
_LIMIT_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")


def inject(folder: Path, count: int, seed: int) -> list[Outcome]:
    """Kill one machine `count` times while both save."""
    _CONTEXT.set_forkserver_preload(["benchmarks.chaos.kills"])
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    store = hold_store(server, wait_s=_LIMIT_S)
    chance, outcomes = random.Random(seed), []
    for number in range(count):  # first at every boundary of each machine, then at random
        rank, at = number % MACHINES, number // MACHINES if number < count // 2 else -1
        delay_s = chance.random() * 0.3
        outcomes.append(_kill_once(folder, port, number, rank, at, delay_s))
    del store
    return outcomes


def _kill_once(folder: Path, port: int, number: int, rank: int, at: int, delay_s: float) -> Outcome:
    """Both save until one is killed: before file operation `at`, or after a time if that is -1."""
    kind = "machine killed at a boundary of a save" if at >= 0 else "machine killed at random"
    pipes = [_CONTEXT.Pipe() for _ in range(MACHINES)]
    workers = [
        _CONTEXT.Process(
            target=_save_on, args=(r, str(folder), port, number, at if r == rank else -1, pipe[1])
        )
        for r, pipe in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    assert pipes[rank][0].poll(_LIMIT_S), "a machine does not start"
    if at < 0:
        time.sleep(delay_s)
        os.kill(_pid(workers[rank]), signal.SIGKILL)
    workers[rank].join(_LIMIT_S)
    time.sleep(0.05)
    for worker in workers:  # as the others' watch does
        worker.kill()
        worker.join()
    published = _published(folder)
    restored = _restored(folder, port, number)
    return _judge(kind, f"{at} of rank {rank}", published, restored)


def _pid(worker: Any) -> int:
    assert worker.pid is not None
    return int(worker.pid)


def _place(folder: str, rank: int) -> Place:
    return Place(Path(folder) / str(rank), f"rank-{rank}", rank, tuple(range(MACHINES)))


def _gather(port: int, rank: int, name: str) -> Callable[[Any], list[Any]]:
    store = connect_store(("127.0.0.1", port), wait_s=_LIMIT_S)
    return Board(store, rank, MACHINES, name=name, limit_s=_LIMIT_S).gather


def _save_on(rank: int, folder: str, port: int, number: int, at: int, pipe: Any) -> None:
    gather = _gather(port, rank, f"save{number}")
    place = _place(folder, rank)
    place.root.mkdir(parents=True, exist_ok=True)
    serials = [offer.serial for offer in files.offers(place.root)]
    serial = max(found or 0 for found in gather(max(serials, default=0)))
    first = serial + 1
    while True:
        serial += 1
        if serial == first + 1:  # the first save is whole
            pipe.send("begins")
            if at >= 0:
                _die_before_operation(at)
        save = Save(serial, number, serial, {"config": "abc"}, keep=1)
        state = {"w": torch.full((2000,), float(serial * 10 + rank))}
        Transaction(place, save, gather, None).run(state)


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


def _published(folder: Path) -> int:
    """The newest step that every machine has published, from its files alone."""
    steps = [set(files.steps(folder / str(rank))) for rank in range(MACHINES)]
    return max(set.intersection(*steps), default=0)


def _restored(folder: Path, port: int, number: int) -> list[Any]:
    pipes = [_CONTEXT.Pipe() for _ in range(MACHINES)]
    workers = [
        _CONTEXT.Process(target=_restore, args=(r, str(folder), port, number, pipe[1]))
        for r, pipe in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    found = [pipe[0].recv() if pipe[0].poll(_LIMIT_S) else "no answer" for pipe in pipes]
    for worker in workers:
        worker.join(_LIMIT_S)
    return found


def _restore(rank: int, folder: str, port: int, number: int, pipe: Any) -> None:
    place = _place(folder, rank)
    choice = Choice(place, _gather(port, rank, f"restore{number}"), _no_peers)
    try:
        chosen = choice.newest(None, lambda _: [place.part])
    except CheckpointError as error:
        pipe.send(str(error))
        return
    state = files.read_part(chosen.folder, place.part)
    step = chosen.manifest.step
    pipe.send((step, bool((state["w"] == step * 10 + rank).all())))


def _no_peers() -> Any:
    raise AssertionError("no other machine holds a copy")


def _judge(kind: str, where: str, published: int, found: list[Any]) -> Outcome:
    if any(isinstance(result, str) for result in found):
        verdict = "lost" if published else "refused"
        return Outcome(kind, verdict, f"{where}: {found}")  # type: ignore[arg-type]
    if len({step for step, _ in found}) > 1 or not all(right for _, right in found):
        return Outcome(kind, "silent", f"{where}: {found}")
    step = found[0][0]
    return Outcome(kind, "lost" if step < published else "survived", f"{where}: step {step}")
