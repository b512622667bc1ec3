"""The commands of `thinpipe launch`: what ssh runs on each machine.

A command ends when its standard input is closed: by ssh when this process closes its end or dies,
by sshd when the connection breaks. So no process is left behind.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.net.ssh.hosts import HostConfig, HostsConfig, rendezvous

GRACE_S = 10
"""How long a command may take to end before it is killed."""
CONNECTED = b"connected"
"""The first line that a command prints: from then on, ssh has done its part."""
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15")
_BREAK = " \\\n"
"""For readability; in a script only after ; and &, where csh may turn it into a plain line end."""


@dataclass(frozen=True)
class Start:
    """The command of all machines: a run file with `settings`, or a program with `arguments`.

    One machine shows progress: `show`, or else the first.
    """

    run: str
    settings: Sequence[str] = ()
    arguments: Sequence[str] = ()
    resume: bool = False
    max_restarts: int = 0
    show: str | None = None

    @property
    def is_program(self) -> bool:
        return Path(self.run).suffix == ".py"

    def check(self) -> None:
        """Reject options of the other kind of run by ConfigError, naming option and remedy."""
        if self.is_program and self.settings:
            raise ConfigError(
                f"--set: settings of {self.run} are in the program; change them there"
            )
        if self.is_program and self.resume:
            raise ConfigError(
                f"--resume: {self.run} says so itself, by the `resume` of its thinpipe.Run"
            )
        if self.arguments and not self.is_program:
            raise ConfigError(
                f"{' '.join(self.arguments)}: a run file takes no arguments; change settings with "
                "--set, or name a program (.py)"
            )


def ssh_commands(hosts: HostsConfig, start: Start) -> dict[str, list[str]]:
    """Commands that start a run, by machine; ConfigError if none is named `start.show`."""
    names = [host.name for host in hosts.host]
    if start.show is not None and start.show not in names:
        raise ConfigError(
            f"--show = {start.show!r}: no such machine; use one of {', '.join(names)}"
        )
    together = ["--nnodes", str(len(names)), "--rdzv", rendezvous(hosts)]
    if start.max_restarts:
        together += ["--max-restarts", str(start.max_restarts)]
    commands = {}
    for host in hosts.host:
        own = ["--ranks", str(host.ranks)] if host.ranks else []
        own += [] if host.name == (start.show or names[0]) else ["--show", "-1"]
        commands[host.name] = ssh(host, _script(host, _thinpipe(start, [*together, *own])))
    return commands


def ssh(host: HostConfig, script: str) -> list[str]:
    """Runs a POSIX shell's script on a machine, whatever the user's shell there."""
    port = ["-p", str(host.port)] if host.port else []
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return ["ssh", "-T", *options, *port, host.destination, f"sh -c {shlex.quote(script)}"]


def enter(folder: str) -> str:
    """Goes to ThinPipe's folder."""
    failed = "{ echo install ThinPipe there, or correct checkout >&2; exit 2; }"
    return f"cd -- {quoted(folder)} || {failed};"


def quoted(path: str) -> str:
    """Quoted for a shell, except for a leading `~/`."""
    home, rest = ("~/", path[2:]) if path.startswith("~/") else ("", path)
    return home + shlex.quote(rest) if rest else home


def format_command(command: Sequence[str]) -> str:
    """A command of `ssh_commands`, quoted for a shell."""
    return f"{shlex.join(command[:-1])}{_BREAK}{shlex.quote(command[-1])}"


def _thinpipe(start: Start, options: Sequence[str]) -> str:
    run = quoted(start.run)
    if start.is_program:
        words = ["--", *start.arguments] if start.arguments else []
        return " ".join(["run", shlex.join(options), run, *map(shlex.quote, words)])
    resume = ["--resume"] if start.resume else []
    return f"train {run} {shlex.join([*start.settings, *resume, *options])}"


def _script(host: HostConfig, command: str) -> str:
    """Runs a command of thinpipe's in the host's checkout until standard input is closed."""
    variables = shlex.join(f"{name}={value}" for name, value in host.variables.items())
    python = f"{quoted(host.python)} -P"
    end = f"kill $run; sleep {GRACE_S}; kill -9 $run"
    return (  # sshd waits for every process that keeps descriptor 3 open
        f"echo {CONNECTED.decode()};{_BREAK}{enter(host.checkout)}"
        f"{_BREAK}exec 3<&0; ( export {variables};"
        f"{_BREAK}exec {python} -m thinpipe.launch {command} ) </dev/null 3<&- & run=$!;"
        f"{_BREAK}{{ while read -r line; do :; done <&3; exec 3<&-; {end}; }} >/dev/null 2>&1 &"
        f"{_BREAK}watch=$!; wait $run; code=$?; kill $watch; exit $code"
    )
