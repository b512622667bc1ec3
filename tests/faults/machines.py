"""A run on emulated hosts with disks of their own, whose processes, ports and files can be seen.

Hosts meet over the overlay. A host's disk is a small file system in RAM, which holds its run folder
and its temporary files. What this process mounts, only it and the hosts see: it must be in a
namespace of its own (`tests.namespaces`).
"""

import contextlib
import getpass
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.faults.hosts import HostsRun
from tests.waiting import until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.lab import linux
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec

HOSTS = 4
DISK_NBYTES = 24 << 20
END_S = 20.0
"""How long what a launcher started may outlive it."""
_CACHES = (f"torchinductor_{getpass.getuser()}",)
"""Kept by torch between runs, for all runs of a user."""


class Machines(HostsRun):
    """Hosts, the launchers of a run on them, and what they leave."""

    def __init__(self, folder: Path, config: str, *settings: str) -> None:
        folder.mkdir()
        self.folder = folder
        for host in range(HOSTS):
            self.disk(host).mkdir()
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "none"]
            subprocess.run([*words, str(self.disk(host))], check=True)
            (self.disk(host) / "tmp").mkdir()
        net = ShapedNetwork(NetworkSpec.of(HOSTS, "1gbit"))  # after what it is to see
        names = net.run(lambda _: os.readlink("/proc/self/ns/net"))
        self._namespaces = {name: host for host, name in enumerate(names)}
        self._marks = dict.fromkeys(range(HOSTS), 0)
        super().__init__(net, folder, config, *settings, hosts=HOSTS)

    def disk(self, host: int) -> Path:
        return self.folder / str(host)

    def run_folder(self, host: int) -> Path:
        return self.disk(host) / "run"

    def environment(self, host: int) -> dict[str, str]:
        return {"TMPDIR": str(self.disk(host) / "tmp")}

    def start(self, host: int) -> None:
        """Start a host's launcher, from the newest checkpoint if a host has one."""
        saved = any(files.steps(self.checkpoints(other)) for other in range(HOSTS))
        self._options = ["--max-restarts", "999", *["--resume"] * saved]
        super().start(host)

    def close(self) -> None:
        """End the launchers, and unmount the disks; logs stay."""
        self.kill()
        self.net.close()
        for host in range(HOSTS):
            linux.unmount(str(self.disk(host)))

    def wait(self, true: Callable[[], object], limit_s: float) -> bool:
        """Wait until something is true; whether it came to be."""
        with contextlib.suppress(AssertionError):
            until(true, limit_s)
            return True
        return False

    def mark(self) -> None:
        """`said` begins here."""
        for host in range(HOSTS):
            self._marks[host] = self.log(host).stat().st_size if self.log(host).exists() else 0

    def said(self, host: int | None = None) -> str:
        """What a host, or all of them, have printed since `mark`."""
        logs = [(self.log(h), self._marks[h]) for h in (range(HOSTS) if host is None else [host])]
        said = [log.read_bytes()[mark:] for log, mark in logs if log.exists()]
        return b"\n".join(said).decode(errors="replace")

    def digests(self, host: int) -> list[str]:
        """Of the parts of a host's newest checkpoint."""
        step = files.newest(self.checkpoints(host))
        folder = self.checkpoints(host) / f"step-{step}"
        return [part.sha256 for part in files.read_manifest(folder).parts] if step else []

    def processes(self, kind: str | None = None) -> list[tuple[int, psutil.Process]]:
        """Hosts and their processes, all or those of a kind; none of the tests' own."""
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
            if words != own and kind in (None, _kind(" ".join(words), name)):
                found.append((host, process))
        return found

    def on_host(self, kind: str, host: int) -> list[psutil.Process]:
        """Processes of a kind on a host."""
        return [found for at, found in self.processes(kind) if at == host]

    def leftovers(self) -> list[str]:
        """What a run that has ended left behind: processes, ports, files."""
        self.wait(lambda: not self.processes(), END_S)
        found = [f"host{host}: process {process}" for host, process in self.processes()]
        for host, ports in enumerate(self.net.run(_listening)):
            found += [f"host{host}: port {port}" for port in ports]
        for host in range(HOSTS):
            hidden = [p for p in (self.disk(host) / "tmp").iterdir() if p.name not in _CACHES]
            if self.checkpoints(host).is_dir():
                hidden += [p for p in self.checkpoints(host).iterdir() if p.name.startswith(".")]
            found += [str(path) for path in hidden]
        return found + [str(path) for path in Path("/dev/shm").iterdir()]


def _kind(line: str, name: str) -> str:
    if re.fullmatch(r"thinpipe \d+", name):
        return "rank"
    names = {"thinpipe wait": "supervisor", "thinpipe server": "fork server"}
    words = {
        "thinpipe.launch.net.overlay.relay": "relay",
        "resource_tracker": "resource tracker",
        "-m thinpipe.launch train": "agent",
        "forkserver": "fork server",
    }
    return names.get(name) or next((kind for word, kind in words.items() if word in line), "other")


def _listening(_host: int) -> list[str]:
    found = psutil.net_connections("inet")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN]
