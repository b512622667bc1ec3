"""A run over emulated hosts, each with a launcher, a relay and a rank of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.waiting import PATIENCE_S, until
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.control import Client
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

PORT = 29500
_LONGEST_S = 900.0
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
        self.net, self.folder, self.hosts = net, folder, hosts
        self._settings, self._options, self._own = settings, options, own or {}
        self.file, self.key = folder / "run.toml", folder / "run.key"
        self.file.write_text(config, encoding="utf-8")
        keys.new(self.key)
        self.codes: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.start_all()

    def start_all(self) -> None:
        self.codes = {}
        for host in range(self.hosts):
            self.start(host)

    def start(
        self, host: int, *settings: str, joins: bool = False, options: Sequence[str] = ()
    ) -> None:
        """Start a host's launcher; if it `joins`, in a run that is under way."""
        changed = [f"run.folder={self.run_folder(host)}", *self._settings]
        changed += [*self._own.get(host, ()), *settings]
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(self.file)]
        where = f"host0:{PORT}"
        words += ["--join", where] if joins else ["--nnodes", str(self.hosts), "--rdzv", where]
        words += [*self._options, *options]
        words += [word for setting in changed for word in ("--set", setting)]
        environment = {**os.environ, "THINPIPE_KEY_FILE": str(self.key), "OMP_NUM_THREADS": "1"}
        environment |= self.environment(host)

        def body() -> int:
            out = os.open(self.log(host), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.execve(words[0], words, environment)

        self.pids[host] = self.net.start(host, body)
        self.codes.pop(host, None)

    def environment(self, host: int) -> dict[str, str]:
        """Variables of a host's launcher."""
        return {}

    def run_folder(self, host: int) -> Path:
        return self.folder / str(host)

    def checkpoints(self, host: int) -> Path:
        return self.run_folder(host) / "checkpoints"

    def log(self, host: int) -> Path:
        """What a host's launcher and rank print."""
        return self.folder / f"log{host}"

    def printed(self, host: int) -> str:
        return self.log(host).read_text(encoding="utf-8") if self.log(host).exists() else ""

    def text(self) -> str:
        """What all hosts printed."""
        return "\n".join(f"== host{host}\n{self.printed(host)}" for host in range(self.hosts))

    def steps(self) -> int:
        """How many steps were trained so far."""
        metrics = self.run_folder(0) / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def records(self) -> list[StepRecord]:
        return read_metrics(self.run_folder(0) / "metrics.jsonl")

    def losses(self) -> list[float]:
        return [record.loss for record in self.records()]

    def wait_for_step(self, step: int) -> None:
        until(lambda: self.steps() >= step or self.has_ended())
        assert not self.codes, self.text()

    def done(self) -> dict[int, int]:
        """Exit codes by host."""
        until(self.has_ended, _LONGEST_S)
        return self.codes

    def relay(self, host: int) -> psutil.Process:
        """The process that carries a host's traffic."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "thinpipe.launch.net.overlay.relay" in words:
                settings = json.loads(words[-1])
                if settings["name"] == f"host{host}" and settings["key_file"] == str(self.key):
                    return psutil.Process(process.pid)  # the one found may be of an older process
        raise ProcessLookupError(f"host{host} has no relay")

    def status(self, host: int) -> Mapping[str, Any]:
        """What a host's relay knows."""
        settings = json.loads(self.relay(host).cmdline()[-1])
        answer: Mapping[str, Any] = Client(settings["socket"]).ask("status")
        return answer

    def resumed(self) -> int:
        """Ends of connections that took over from a broken one."""
        links = (self.status(host)["links"].values() for host in range(self.hosts))
        return sum(link["resumed"] for of_host in links for link in of_host)

    def on(self, host: int, function: Callable[[], _T]) -> _T:
        """Call on a host."""
        return self.net.run(lambda _: function(), hosts=[host])[0]

    def has_ended(self) -> bool:
        """Whether all launchers have ended; `codes` says how."""
        for host, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[host] = os.waitstatus_to_exitcode(status)
                del self.pids[host]
        return not self.pids

    def kill(self) -> None:
        """End what still runs."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        until(self.has_ended, PATIENCE_S)


def kill_machine(run: HostsRun, host: int) -> list[psutil.Process]:
    """All processes of a host at once, as if its power had gone."""
    launcher = psutil.Process(run.pids[host])
    own = [run.relay(host), launcher, *launcher.children(recursive=True)]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in own:
            with suppress(psutil.NoSuchProcess):  # one that looked at something, and ended
                process.send_signal(signum)
    return own


def cut_off(run: HostsRun, host: int, cut: bool, *, ways: str = "both") -> None:
    """Nothing leaves a host ("out"), or comes to it ("in"), from now on, or does again."""
    others = [other for other in range(run.hosts) if other != host]
    if ways != "in":
        run.on(host, lambda: _routes(cut, others))
    for other in others if ways != "out" else ():
        run.on(other, lambda: _routes(cut, [host]))


def _routes(cut: bool, others: Sequence[int]) -> None:
    for other in others:
        words = ["ip", "route", "add" if cut else "del", "blackhole", f"10.77.0.{other + 1}/32"]
        subprocess.run(words, check=True)


def unplug(run: HostsRun, host: int, cut: bool) -> None:
    """A host's network card goes down, or comes up."""

    def change() -> None:
        subprocess.run(["ip", "link", "set", "eth0", "down" if cut else "up"], check=True)
        for other in range(run.hosts) if not cut else ():  # neighbors are forgotten with the link
            if other != host:
                given = ["ip", "neigh", "replace", f"10.77.0.{other + 1}", "dev", "eth0"]
                given += ["lladdr", f"02:00:00:00:00:{other + 1:02x}", "nud", "permanent"]
                subprocess.run(given, check=True)

    run.on(host, change)


def reset(run: HostsRun, host: int) -> None:
    """End all of a host's connections to others, at once and on both sides."""

    def end() -> None:
        for other in range(run.hosts):
            if other != host:
                words = ["ss", "-K", "dst", f"10.77.0.{other + 1}"]
                subprocess.run(words, check=False, capture_output=True)

    run.on(host, end)


def pause(seconds: float, change: Callable[[bool], None]) -> None:
    """Have something broken for so long."""
    change(True)
    time.sleep(seconds)
    change(False)
