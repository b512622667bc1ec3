"""`thinpipe launch`: one `thinpipe train` on every machine of a run, over ssh.

A command ends when its standard input is closed: by ssh when this process closes its end or dies,
by sshd when the connection breaks. So no process is left behind.
"""

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from thinpipe.launch.config.placement import check_hosts, hosts_by_rank
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.toml import ConfigError, load_as, top_keys
from thinpipe.launch.host.interfaces import parse_endpoint

INTERRUPTED = 130
_SSH_FAILED, _NOT_FOUND = 255, 127
_RENDEZVOUS_PORT = 29500
_REPORT_S = 3.0
"""How long the other machines may report a failure before they are ended."""
_REMOTE_GRACE_S = 10
_END_S = _REMOTE_GRACE_S + 5.0
_POLL_S = 0.05
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15")
_BREAK = " \\\n"
"""For readability; in a script only after ; and &, where csh may turn it into a plain line end."""
_STRICT = ConfigDict(frozen=True, extra="forbid")


def _matching(pattern: str, remedy: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r}: {remedy}")
        return value

    return AfterValidator(check)


_Word = Annotated[str, _matching(r"[\w.:%][\w.:%-]*", "use letters, digits, and . : _ - inside")]
_Variable = Annotated[str, _matching(r"[A-Za-z_]\w*", "a shell cannot set a variable so named")]
_FilePath = Annotated[str, _matching(r"[^-\n][^\n]*", "give a path")]


class HostConfig(BaseModel):
    """A machine: how ssh reaches it, and where things are on it.

    `checkout` is ThinPipe's folder, relative to the user's home; `python` and the run file are
    relative to it. `interface` is the one that the other machines can reach.
    """

    model_config = _STRICT

    name: _Word
    address: _Word | None = None
    user: _Word | None = None
    port: int | None = Field(None, ge=1, le=65535)
    checkout: _FilePath
    python: _FilePath = ".venv/bin/python"
    interface: _Word | None = None
    environment: dict[_Variable, str] = {}

    @property
    def destination(self) -> str:
        """The argument of ssh; without an address, the name, which may be an alias of ssh's."""
        address = self.address or self.name
        return f"{self.user}@{address}" if self.user else address

    @property
    def name_in_run(self) -> str:
        """Its `network.name`."""
        return re.sub(r"[^\w.-]", "-", self.name)[:63]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its ranks."""
        own = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {"PYTHONUNBUFFERED": "1"} | own | self.environment

    @model_validator(mode="after")
    def _one_interface(self) -> Self:
        if self.interface and "GLOO_SOCKET_IFNAME" in self.environment:
            raise ValueError(
                f"interface = {self.interface!r}: environment sets GLOO_SOCKET_IFNAME too; "
                "remove one of them"
            )
        return self


class HostsConfig(BaseModel):
    """The machines of a run, with rendezvous at `rdzv`, by default on the first one."""

    model_config = _STRICT

    rdzv: str | None = None
    host: tuple[HostConfig, ...] = Field(min_length=1)

    @property
    def endpoint(self) -> str:
        """The `host:port` of the rendezvous."""
        return self.rdzv or f"{self.host[0].address or self.host[0].name}:{_RENDEZVOUS_PORT}"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [host.name for host in self.host]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"host.name = {twice!r}: duplicate; give each host its own name")
        try:
            parse_endpoint(self.endpoint)
        except ValueError:
            raise ValueError(
                f"rdzv = {self.endpoint!r}: write a host and a port, as in host0:29500"
            ) from None
        return self


def load_hosts(path: Path) -> HostsConfig:
    """Read the file that lists the machines.

    Raises:
        ConfigError: naming file, key, value and remedy.
    """
    keys = top_keys(path)
    if keys & RunConfig.model_fields.keys() and not keys & HostsConfig.model_fields.keys():
        raise ConfigError(
            f"{path}: a run file; the hosts file comes first: thinpipe launch HOSTS.TOML RUN.TOML"
        )
    return load_as(HostsConfig, path)


def check_run(hosts: HostsConfig, run: str, overrides: Sequence[str]) -> RunConfig:
    """Report here the errors that every machine would report; needs the run file here.

    Raises:
        ConfigError: the run file or an override is wrong, or the machines cannot share the ranks.
    """
    config = load_config(Path(run).expanduser(), overrides)
    world, machines = config.world_size, len(hosts.host)
    if world % machines:
        fitting = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"{run}: {machines} machines cannot share {world} ranks (stages x replicas) evenly; "
            f"with {world} ranks a hosts file lists {', '.join(fitting)} machines"
        )
    placed, names = config.pipeline.placement, [host.name_in_run for host in hosts.host]
    if placed and machines > 1:
        check_hosts(hosts_by_rank(placed), names, f"the machines of the hosts file ({run})")
    return config


def ssh_commands(
    hosts: HostsConfig, run: str, arguments: Sequence[str], *, show: str | None = None
) -> dict[str, list[str]]:
    """Commands that start `thinpipe train <run> <arguments>`, by machine name.

    One machine shows progress: `show`, or else the first.

    Raises:
        ConfigError: no machine is named `show`.
    """
    names = [host.name for host in hosts.host]
    if show is not None and show not in names:
        raise ConfigError(f"--show = {show!r}: no such machine; use one of {', '.join(names)}")
    together = ["--nnodes", str(len(names)), "--rdzv", hosts.endpoint]
    commands = {}
    for host in hosts.host:
        quiet = [] if host.name == (show or names[0]) else ["--show", "-1"]
        name = ["--set", f"network.name={host.name_in_run}"] if len(names) > 1 else []
        train = f"train {_path(run)} {shlex.join([*name, *arguments, *together, *quiet])}"
        commands[host.name] = _ssh(host, train)
    return commands


def what_to_copy(hosts: HostsConfig, run: str, key: str | None) -> str:
    """What every machine must have, and commands that copy it there; `key` if one is set."""
    files = [run, *([key] if key else [])]
    lines = [f"every machine reads its own copy of {' and '.join(files)}; those without one need:"]
    for host in hosts.host:
        port = ["-P", str(host.port)] if host.port else []
        for file in files:
            given = file if file.startswith("/") else f"{_path(host.checkout)}/{shlex.quote(file)}"
            lines.append(f"  {shlex.join(['scp', *port, file])} {host.destination}:{given}")
    return "\n".join(lines)


def format_command(command: Sequence[str]) -> str:
    """A command of `ssh_commands`, quoted for a shell."""
    return f"{shlex.join(command[:-1])}{_BREAK}{shlex.quote(command[-1])}"


def run_commands(hosts: HostsConfig, commands: Mapping[str, Sequence[str]]) -> int:
    """Run a command of `ssh_commands` per machine; return the exit code of the first failure.

    Output lines are prefixed with the machine's name. A failure or Ctrl-C ends all.

    Raises:
        ValueError: this machine has no ssh.
    """
    started: dict[str, _Remote] = {}
    try:
        for name, command in commands.items():
            started[name] = _Remote(name, command)
        failed = _first_failure(started)
        if failed is not None:
            _wait(started.values(), _REPORT_S)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _end(started.values())
    if failed is None:
        return 0
    name, code = failed
    host = next(host for host in hosts.host if host.name == name)
    sys.stderr.write(f"error: {_reason(host, code)}; the others were ended\n")
    return code


class _Remote:
    """A running ssh, and the threads that show its output."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # we pass Ctrl-C on ourselves
            )
        except FileNotFoundError:
            raise ValueError(
                f"{command[0]}: not on this machine; install OpenSSH's client"
            ) from None
        prefix = f"{name}| ".encode()
        shown = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=_show, args=(prefix, source, sink.buffer), daemon=True)
            for source, sink in shown
        ]
        for thread in self._threads:
            thread.start()

    @property
    def code(self) -> int | None:
        """Exit code as in a shell, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Kill the process if it still runs, and show its last output."""
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(_REPORT_S)  # a child of it may keep the pipe open


def _show(prefix: bytes, source: IO[bytes], sink: IO[bytes]) -> None:
    with source:
        for line in source:
            sink.write(prefix + line.rstrip(b"\r\n") + b"\n")
            sink.flush()


def _first_failure(started: Mapping[str, _Remote]) -> tuple[str, int] | None:
    """Wait for a failure, or until all have succeeded."""
    while True:
        codes = {name: remote.code for name, remote in started.items()}
        failed = next(((name, code) for name, code in codes.items() if code), None)
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


def _ssh(host: HostConfig, train: str) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    options = [word for option in _OPTIONS for word in ("-o", option)]
    variables = shlex.join(f"{name}={value}" for name, value in host.variables.items())
    command = f"env {variables} {_path(host.python)} -P -m thinpipe.launch {train}"
    script = _script(_path(host.checkout), command)
    return ["ssh", "-T", *options, *port, host.destination, f"sh -c {shlex.quote(script)}"]


def _script(folder: str, command: str) -> str:
    """Runs `command` in `folder` until standard input is closed."""
    end = f"kill $run; sleep {_REMOTE_GRACE_S}; kill -9 $run"
    return (  # sshd waits for every process that keeps descriptor 3 open
        f"cd -- {folder} || {{ echo install ThinPipe there, or correct checkout >&2; exit 2; }};"
        f"{_BREAK}exec 3<&0;{_BREAK}{command} </dev/null 3<&- & run=$!;"
        f"{_BREAK}{{ while read -r line; do :; done <&3; exec 3<&-; {end}; }} >/dev/null 2>&1 &"
        f"{_BREAK}watch=$!; wait $run; code=$?; kill $watch; exit $code"
    )


def _path(path: str) -> str:
    """Quoted for a shell, except for a leading `~/`."""
    home, rest = ("~/", path[2:]) if path.startswith("~/") else ("", path)
    return home + shlex.quote(rest) if rest else home


def _reason(host: HostConfig, code: int) -> str:
    if code == _SSH_FAILED:
        port = f"-p {host.port} " if host.port else ""
        return (
            f"{host.name}: ssh could not connect to {host.destination}, or lost the connection; "
            f"check that `ssh {port}{host.destination} true` works without a prompt, and correct "
            "address, user, port or keys (ssh-copy-id)"
        )
    if code == _NOT_FOUND:
        return (
            f"{host.name}: python = {host.python!r}: not found in {host.checkout}; install "
            "ThinPipe there, or correct python in the hosts file"
        )
    return f"{host.name} ended with exit code {code}"
