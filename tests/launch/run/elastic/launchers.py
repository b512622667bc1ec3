"""A small elastic run under true commands: all its replicas on this machine."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port
from tests.processes import lives, named
from tests.texts import write_run
from tests.waiting import PATIENCE_S, until

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
TWO_BY_TWO = (
    "pipeline.replicas=2",
    "pipeline.cuts=[1]",
    "pipeline.microbatches=2",
    'boundary=[{forward={kind="aqsgd",bits=4},backward={kind="direct",bits=8}}]',
)
_RAW = """
[[boundary]]
forward = {{ kind = "raw" }}
backward = {{ kind = "raw" }}
"""


class Launchers:
    """Of three replicas: one launcher, or one for each."""

    def __init__(
        self,
        folder: Path,
        *settings: str,
        count: int = 3,
        method: str = "ef_gradients",
        apart: bool = False,
        store_last: bool = False,
    ) -> None:
        """Those that are `apart` have names, as if each was on a machine of its own; `store_last`:
        that with the store has the last rank.
        """
        self.folder, self._file = folder, write_run(folder, RUN + _RAW, method=method)
        self._where, self._settings = f"127.0.0.1:{(port := free_port())}", settings
        meet = ["--nnodes", str(count), "--rdzv", self._where] if count > 1 else []
        names = [
            ["--set", f"network.name=host{9 - number if store_last else number}"] * apart
            for number in range(count)
        ]
        self.launchers = [self.start(0, *meet, *names[0])]
        if count > 1:  # it holds the store
            first = psutil.Process(self.launchers[0].pid)
            until(lambda: port in [socket.laddr.port for socket in first.net_connections()])
        self.launchers += [self.start(n, *meet, *names[n]) for n in range(1, count)]
        self._seen: list[psutil.Process] = []

    def start(self, number: int, *options: str) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(self._file), *options]
        words += [word for setting in self._settings for word in ("--set", setting)]
        with (self.folder / f"log{number}").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)

    def join(self, number: int, *options: str) -> "subprocess.Popen[bytes]":
        launcher = self.start(number, "--join", self._where, *options)
        self.launchers.append(launcher)
        return launcher

    @property
    def run_folder(self) -> Path:
        """Of rank 0."""
        return self.folder / "run"

    @property
    def steps(self) -> int:
        path = self.run_folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def summary(self) -> dict[str, Any]:
        text = (self.run_folder / "summary.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return found

    def said(self, number: int = 0) -> str:
        return " ".join((self.folder / f"log{number}").read_text(encoding="utf-8").split())

    def wait_for_step(self, step: int) -> None:
        until(lambda: self.steps >= step or self.launchers[0].poll() is not None)
        assert self.launchers[0].poll() is None, self.said()

    def kill_rank(self, rank: int, *, after: int = 0, by: int = signal.SIGKILL) -> None:
        """A signal, whoever started it, once so many steps are on record."""
        self.wait_for_step(after)
        running = [psutil.Process(one.pid) for one in self.launchers if one.poll() is None]
        self._seen = [process for one in running for process in one.children(recursive=True)]
        (found,) = named(self._seen, f"thinpipe {rank}")
        found.send_signal(by)

    def number_of(self, rank: int) -> int:
        """That of the launcher of a rank."""
        (found,) = [
            number
            for number, launcher in enumerate(self.launchers)
            if launcher.poll() is None
            and named(psutil.Process(launcher.pid).children(recursive=True), f"thinpipe {rank}")
        ]
        return found

    def done(self) -> list[int]:
        """Exit codes; all that was there when a rank was killed is gone then."""
        codes = [launcher.wait(PATIENCE_S) for launcher in self.launchers]
        until(lambda: not any(map(lives, self._seen)))
        return codes
