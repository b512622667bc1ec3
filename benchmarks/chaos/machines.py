"""A run on emulated hosts with disks of their own, whose processes, ports and files can be seen.

Hosts have a network each, `ShapedNetwork`'s, and meet over the overlay. A host's disk is a small
file system in RAM, which holds its run folder and its temporary files. What this process mounts,
only it and the hosts see, and it is gone with it.
"""

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from thinpipe.launch.checkpoint import files
from thinpipe.launch.host.links import NetworkSpec
from thinpipe.launch.overlay import keys
from thinpipe.launch.shaped import linux
from thinpipe.launch.shaped.network import ShapedNetwork

HOSTS = 4
PORT = 29500
DISK_NBYTES = 24 << 20
END_S = 20.0
"""How long what a launcher started may outlive it."""
_CACHES = (f"torchinductor_{getpass.getuser()}",)
"""Kept by torch between runs, for all runs of a user."""
_AGENT = ("-m", "thinpipe.launch", "train")


def isolate() -> None:
    """Hide what this process mounts from others, and give it an empty /dev/shm.

    Raises:
        ShapedError: that is not allowed here.
    """
    try:
        linux.unshare(linux.NEW_MOUNT)
        linux.make_mounts_private()
        linux.mount_tmpfs("/dev/shm")
    except OSError as error:
        raise linux.ShapedError(f"disks of emulated hosts: {error}; run this as root") from error


class Machines:
    """Hosts, the launchers of a run on them, and what they leave in `folder`."""

    def __init__(self, folder: Path, config: str, *settings: str) -> None:
        """Nothing runs yet: `start_all` starts the launchers.

        Raises:
            ShapedError: the system does not allow it.
        """
        self.folder, self._settings = folder, settings
        folder.mkdir()
        self.file, self.key = folder / "run.toml", folder / "run.key"
        self.file.write_text(config, encoding="utf-8")
        keys.new(self.key)
        for host in range(HOSTS):
            self._mount(self.disk(host))
        self.net = ShapedNetwork(NetworkSpec.of(HOSTS, "1gbit"))  # after what it is to see
        names = self.net.run(lambda _: os.readlink("/proc/self/ns/net"), hosts=range(HOSTS))
        self._namespaces = {name: host for host, name in enumerate(names)}
        self._marks = dict.fromkeys(range(HOSTS), 0)
        self._pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.own: dict[int, list[str]] = {}
        """Settings of single hosts."""
        self.known_ports: set[str] = set()
        """Ports of this benchmark's own, as ADDRESS:PORT."""

    def disk(self, host: int) -> Path:
        """A host's disk."""
        return self.folder / str(host)

    def run_folder(self, host: int) -> Path:
        """A host's run folder."""
        return self.disk(host) / "run"

    def checkpoints(self, host: int) -> Path:
        """A host's checkpoints."""
        return self.run_folder(host) / "checkpoints"

    def close(self) -> None:
        """End the launchers, and unmount the disks; logs stay."""
        for host in list(self._pids):
            os.kill(self._pids[host], signal.SIGKILL)
            os.waitpid(self._pids.pop(host), 0)
        self.net.close()
        for host in range(HOSTS):
            linux.unmount(str(self.disk(host)))

    # Launchers -----------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start all launchers, from the newest checkpoint if a host has one."""
        self.codes = {}
        for host in range(HOSTS):
            self.start(host)

    def start(self, host: int) -> None:
        """Start a host's launcher."""
        saved = any(files.steps(self.checkpoints(other)) for other in range(HOSTS))
        changed = [f"run.folder={self.run_folder(host)}", *self._settings]
        changed += self.own.get(host, [])
        words = [sys.executable, "-P", *_AGENT, str(self.file)]
        words += ["--nnodes", str(HOSTS), "--rdzv", f"host0:{PORT}", "--max-restarts", "999"]
        words += ["--resume"] if saved else []
        words += [word for setting in changed for word in ("--set", setting)]

        def body() -> int:
            out = os.open(self._log(host), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            changes = {"THINPIPE_KEY_FILE": str(self.key), "OMP_NUM_THREADS": "1"}
            changes["TMPDIR"] = str(self.disk(host) / "tmp")
            os.execve(words[0], words, {**os.environ, **changes})

        self._pids[host] = self.net.start(host, body)
        self.codes.pop(host, None)

    def has_ended(self) -> bool:
        """Whether all launchers have ended; `codes` says how."""
        for host, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[host] = os.waitstatus_to_exitcode(status)
                del self._pids[host]
        return not self._pids

    def wait(self, true: Callable[[], object], limit_s: float) -> bool:
        """Wait until something is true; whether it came to be."""
        limit_s += time.monotonic()
        while not true():
            if time.monotonic() > limit_s:
                return False
            time.sleep(0.005)
        return True

    # What they say and do ------------------------------------------------------------------------

    def mark(self) -> None:
        """`said` begins here."""
        for host in range(HOSTS):
            self._marks[host] = self._log(host).stat().st_size if self._log(host).exists() else 0

    def said(self, host: int | None = None) -> str:
        """What a host, or all of them, have printed since `mark`."""
        texts = []
        for each in range(HOSTS) if host is None else [host]:
            if self._log(each).exists():
                with self._log(each).open("rb") as log:
                    log.seek(self._marks[each])
                    texts.append(log.read().decode(errors="replace"))
        return "\n".join(texts)

    def text(self) -> str:
        """All that all hosts have printed."""
        logs = [self._log(host) for host in range(HOSTS)]
        return "\n".join(
            f"== {log.name}\n{log.read_text(encoding='utf-8')}" for log in logs if log.exists()
        )

    def steps(self) -> int:
        """How many steps are in the metrics."""
        metrics = self.run_folder(0) / "metrics.jsonl"
        try:
            return metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def records(self) -> list[dict[str, object]]:
        """The metrics so far; a line under way is left out."""
        metrics = self.run_folder(0) / "metrics.jsonl"
        if not metrics.exists():
            return []
        lines = metrics.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def digests(self, host: int) -> list[str]:
        """Of the parts of a host's newest checkpoint."""
        step = files.newest(self.checkpoints(host))
        folder = self.checkpoints(host) / f"step-{step}"
        return [part.sha256 for part in files.read_manifest(folder).parts] if step else []

    # Processes, ports, files ---------------------------------------------------------------------

    def processes(self, kind: str | None = None) -> list[tuple[int, psutil.Process]]:
        """Hosts and their processes, all or those of a kind; none of this benchmark's own."""
        found, own = [], psutil.Process().cmdline()
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid)
                host = self._namespaces.get(os.readlink(f"/proc/{pid}/ns/net"))
                if host is None or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                words, name = process.cmdline(), process.name()
            except (psutil.Error, OSError):
                continue
            if words != own and kind in (None, _kind(words, name)):
                found.append((host, process))
        return found

    def process(self, kind: str, host: int) -> psutil.Process | None:
        """The process of a kind on a host."""
        return next((found for at, found in self.processes(kind) if at == host), None)

    def leftovers(self) -> list[str]:
        """What a run that has ended left behind: processes, ports, files."""
        self.wait(lambda: not self.processes(), END_S)
        found = [f"host{host}: process {_words(p)}" for host, p in self.processes()]
        for host, ports in enumerate(self.net.run(_listening, hosts=range(HOSTS))):
            found += [f"host{host}: port {port}" for port in ports if port not in self.known_ports]
        for host in range(HOSTS):
            hidden = [p for p in (self.disk(host) / "tmp").iterdir() if p.name not in _CACHES]
            if self.checkpoints(host).is_dir():
                hidden += [p for p in self.checkpoints(host).iterdir() if p.name.startswith(".")]
            found += [f"host{host}: {path.relative_to(self.disk(host))}" for path in hidden]
        return found + [f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()]

    def _log(self, host: int) -> Path:
        return self.folder / f"log{host}"

    @staticmethod
    def _mount(folder: Path) -> None:
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "none", str(folder)]
        subprocess.run(words, check=True)
        (folder / "tmp").mkdir()


def _kind(words: Sequence[str], name: str) -> str:
    if re.fullmatch(r"thinpipe \d+", name):
        return "rank"
    known = {"thinpipe wait": "supervisor", "thinpipe server": "fork server"}
    if name in known:
        return known[name]
    line = " ".join(words)
    if "thinpipe.launch.overlay.carrier" in line:
        return "carrier"
    if "resource_tracker" in line:
        return "resource tracker"
    if " ".join(_AGENT) in line:
        return "agent"
    return "fork server" if "forkserver" in line else "other"


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return f"{process.pid}, ended meanwhile"


def _listening(_host: int) -> list[str]:
    found = psutil.net_connections("inet")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN]
