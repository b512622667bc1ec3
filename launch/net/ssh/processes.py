"""Runs the commands of `thinpipe launch`, and shows what they print."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.host.words import format_duration
from thinpipe.launch.net.ssh.commands import CONNECTED, GRACE_S
from thinpipe.launch.net.ssh.hosts import HostConfig, HostsConfig

LEFT_OUT = os.EX_TEMPFAIL
"""Of a machine that the others go on without (`LOST` in `net/ranks/failures.py`)."""
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
SSH_FAILED, _NOT_FOUND = 255, 127  # ssh's own; a shell's without the command
_REPORT_S = 3.0  # how long the other machines may report a failure before they are ended
_END_S = GRACE_S + 5.0
_POLL_S = 0.05  # so late a machine's failure is noticed


def run_commands(hosts: HostsConfig, commands: Mapping[str, Sequence[str]]) -> int:
    """Run a command of `ssh_commands` per machine; return the exit code of the first failure.

    Output lines are prefixed with the machine's name. A failure or Ctrl-C ends all.
    """
    started: dict[str, _Remote] = {}
    try:
        for name, command in commands.items():
            started[name] = _Remote(name, command)
        failed, lasted_s = _first_failure(started), None
        if failed is not None:
            lasted_s = started[failed[0]].connected_s
            _wait(started.values(), _REPORT_S)
    except KeyboardInterrupt:
        print_error(f"asked to stop: {', '.join(started)} save and end, within {_END_S:.0f} s")
        return INTERRUPTED
    finally:
        _end(started.values())
    if failed is None:
        return max(remote.code or 0 for remote in started.values())
    name, code = failed
    host = next(host for host in hosts.host if host.name == name)
    print_error(f"error: {_reason(host, code, lasted_s)}; the others were ended")
    return code


def start_ssh(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ssh with pipes; ValueError if this machine has none."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # we pass Ctrl-C on ourselves
        )
    except FileNotFoundError:
        raise ValueError(f"{command[0]}: not on this machine; install OpenSSH's client") from None


def not_connected(host: HostConfig) -> str:
    """The remedy where ssh cannot log in."""
    port = f"-p {host.port} " if host.port else ""
    return (
        f"{host.name}: ssh could not connect to {host.destination}; check that "
        f"`ssh {port}{host.destination} true` works without a prompt, and correct address, user, "
        "port or keys (ssh-copy-id)"
    )


class _Remote:
    """A running ssh, and the threads that show its output."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._process = process = start_ssh(command)
        self._connected_s: float | None = None
        prefix = f"{name}| ".encode()
        shown = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._show, args=(prefix, source, sink.buffer), daemon=True)
            for source, sink in shown
        ]
        for thread in self._threads:
            thread.start()

    @property
    def code(self) -> int | None:
        """Exit code as in a shell, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def connected_s(self) -> float | None:
        return None if self._connected_s is None else time.monotonic() - self._connected_s

    def ask_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Kill the process if it still runs, and show its last output."""
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(_REPORT_S)  # a child of it may keep the pipe open

    def _show(self, prefix: bytes, source: IO[bytes], sink: IO[bytes]) -> None:
        with source:
            for line in source:
                if self._connected_s is None and line.strip() == CONNECTED:
                    self._connected_s = time.monotonic()
                    continue
                sink.write(prefix + line.rstrip(b"\r\n") + b"\n")
                sink.flush()


def _first_failure(started: Mapping[str, _Remote]) -> tuple[str, int] | None:
    while True:
        codes = {name: remote.code for name, remote in started.items()}
        bad = ((name, code) for name, code in codes.items() if code and code != LEFT_OUT)
        failed = next(bad, None)
        if failed is not None or None not in codes.values():
            return failed
        time.sleep(_POLL_S)


def _wait(remotes: Collection[_Remote], limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while any(remote.code is None for remote in remotes) and time.monotonic() < limit:
        time.sleep(_POLL_S)


def _end(remotes: Collection[_Remote]) -> None:
    for remote in remotes:
        remote.ask_to_end()
    _wait(remotes, _END_S)
    for remote in remotes:
        remote.close()


def _reason(host: HostConfig, code: int, lasted_s: float | None) -> str:
    """`lasted_s`: how long ssh had been connected; None: it never was."""
    if code == SSH_FAILED:
        if lasted_s is None:
            return not_connected(host)
        return (
            f"{host.name}: the ssh connection to {host.destination} was lost after "
            f"{format_duration(lasted_s)}; look whether the machine and its network are up, then "
            "start again with --resume"
        )
    if code == _NOT_FOUND:
        return (
            f"{host.name}: python = {host.python!r}: not found in {host.checkout}; install "
            "ThinPipe there, or correct python in the hosts file"
        )
    return f"{host.name} ended with exit code {code}"
