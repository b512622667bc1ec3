"""A run over emulated hosts, each with a launcher, a carrier and a rank of its own."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from thinpipe.launch.overlay import keys
from thinpipe.launch.overlay.control import Client
from thinpipe.launch.report.metrics import StepRecord, read_metrics
from thinpipe.launch.shaped.network import ShapedNetwork

PORT = 29500
PATIENCE_S, _LONGEST_S = 120.0, 900.0
_T = TypeVar("_T")


class HostsRun:
    """`thinpipe train --nnodes N` on the first hosts of a network, with a new key.

    `config` is the run file; every host has `folder/K` as its run folder and `folder/logK`.
    `settings` change it on all hosts, `own` on single ones.
    """

    def __init__(
        self,
        net: ShapedNetwork,
        folder: Path,
        config: str,
        *settings: str,
        hosts: int,
        options: Sequence[str] = (),
        own: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.folder, self.hosts = folder, hosts
        self._net, self._settings, self._options = net, settings, options
        self._own = own or {}
        self.file, self.key = folder / "run.toml", folder / "run.key"
        self.file.write_text(config, encoding="utf-8")
        keys.new(self.key)
        self.codes: dict[int, int] = {}
        self.ended_s: dict[int, float] = {}
        self.pids = {host: self.start(host) for host in range(hosts)}

    def start(self, host: int) -> int:
        """Start a host's launcher."""
        changed = [f"run.folder={self.folder}/{host}", *self._settings]
        changed += self._own.get(host, ())
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(self.file)]
        words += ["--nnodes", str(self.hosts), "--rdzv", f"host0:{PORT}"]
        words += self._options
        words += [word for setting in changed for word in ("--set", setting)]

        def body() -> int:
            out = os.open(self.log(host), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            changes = {"THINPIPE_KEY_FILE": str(self.key), "OMP_NUM_THREADS": "1"}
            os.execve(words[0], words, {**os.environ, **changes})

        return self._net.start(host, body)

    def log(self, host: int) -> Path:
        """What a host's launcher and rank print."""
        return self.folder / f"log{host}"

    def text(self) -> str:
        """What all hosts printed."""
        return "\n".join(self.log(host).read_text(encoding="utf-8") for host in range(self.hosts))

    def steps(self) -> int:
        """How many steps were trained so far."""
        metrics = self.folder / "0" / "metrics.jsonl"
        return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0

    def records(self) -> list[StepRecord]:
        """The metrics so far."""
        return read_metrics(self.folder / "0" / "metrics.jsonl")

    def losses(self) -> list[float]:
        """The loss of every step."""
        return [record.loss for record in self.records()]

    def wait_for_step(self, step: int) -> None:
        """Wait until that many steps were trained."""
        wait_until(lambda: self.steps() >= step or self.has_ended(), self.text)
        assert not self.codes, self.text()

    def done(self) -> dict[int, int]:
        """Exit codes by host; `ended_s` says when each ended."""
        wait_until(self.has_ended, self.text, limit_s=_LONGEST_S)
        return self.codes

    def carrier(self, host: int) -> psutil.Process:
        """The process that carries a host's traffic."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "thinpipe.launch.overlay.carrier" in words:
                settings = json.loads(words[-1])
                if settings["name"] == f"host{host}" and settings["key_file"] == str(self.key):
                    return psutil.Process(process.pid)  # the one found may be of an older process
        raise ProcessLookupError(f"host{host} has no carrier")

    def status(self, host: int) -> Mapping[str, Any]:
        """What a host's carrier knows."""
        settings = json.loads(self.carrier(host).cmdline()[-1])
        answer: Mapping[str, Any] = Client(settings["socket"]).ask("status")
        return answer

    def on(self, host: int, function: Callable[[], _T]) -> _T:
        """Call on a host."""
        return self._net.run(lambda _: function(), hosts=[host])[0]

    def has_ended(self) -> bool:
        """Whether all launchers have ended."""
        for host, pid in self.pids.items():
            if host not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[host] = os.waitstatus_to_exitcode(status)
                    self.ended_s[host] = time.monotonic()
        return len(self.codes) == len(self.pids)

    def kill(self) -> None:
        """End what still runs."""
        for host, pid in self.pids.items():
            if host not in self.codes:
                os.kill(pid, signal.SIGKILL)
        wait_until(self.has_ended, self.text)


def wait_until(
    true: Callable[[], bool], explain: Callable[[], str], *, limit_s: float = PATIENCE_S
) -> None:
    """Wait a limited time."""
    limit_s += time.monotonic()
    while not true():
        if time.monotonic() > limit_s:
            raise TimeoutError(explain())
        time.sleep(0.02)
