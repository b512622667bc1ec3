"""A run whose page is attacked learns the same."""

import socket
import threading
from pathlib import Path

import pytest

from tests.commands import Command
from tests.launch.test_train import run_file
from tests.ports import free_port
from tests.waiting import until
from thinpipe.launch.view.report.metrics import read_metrics

__all__ = ["run_file"]


def losses(run_file: Path, name: str, epochs: int, *settings: str) -> list[float]:
    folder, length = (
        run_file.parent / name,
        (f"train.epochs={epochs}", f"eval.every_epochs={epochs}"),
    )
    settings = (f"run.folder={folder}", *length, *settings)
    run = Command("train", run_file, *(word for s in settings for word in ("--set", s)))
    done = run.done()
    assert done.returncode == 0, done.stderr
    return [record.loss for record in read_metrics(folder / "metrics.jsonl")]


def attack(port: int, over: threading.Event, held: list[socket.socket]) -> None:
    """Hold connections that ask for nothing, and send headers without an end."""
    while not over.is_set():
        try:
            client = socket.create_connection(("127.0.0.1", port), timeout=10)
            held.append(client)
            client.sendall(b"GET /../../etc/passwd HTTP/1.1\r\nX: " + b"x" * 20_000)
        except OSError:  # not there yet, or closed before all was sent
            over.wait(0.05)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.dist
def test_losses_are_the_same_while_the_page_is_attacked(run_file: Path) -> None:
    port, over, held = free_port(), threading.Event(), list[socket.socket]()
    attacker = threading.Thread(target=attack, args=(port, over, held))
    attacker.start()
    epochs = 10
    try:
        while len(held) <= 100:  # on a busy machine a short run is over before its page is there
            epochs *= 2
            found = losses(run_file, f"attacked for {epochs}", epochs, f"watch.port={port}")
    finally:
        over.set()
        attacker.join()
        for client in held:
            client.close()
    assert found == losses(run_file, "alone", epochs)
    until(lambda: refuses(port), 10)  # the page ends soon after its run
