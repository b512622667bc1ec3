"""`thinpipe launch hosts.toml run.toml`."""

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.launch.config.cli_options import RestartsOption, SetOption, reject
from thinpipe.launch.config.network import KEY_FILE, NO_KEY, NetworkConfig
from thinpipe.launch.config.placement import check_hosts, hosts_by_rank
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.net.ssh.commands import Start, format_command, ssh_commands
from thinpipe.launch.net.ssh.copying import copy_files, files_to_copy
from thinpipe.launch.net.ssh.hosts import HostsConfig, check_shares, load_hosts, rendezvous
from thinpipe.launch.net.ssh.processes import run_commands
from thinpipe.launch.run.script import look_at
from thinpipe.pipeline.models.paths import user_path


def launch_on_hosts(  # noqa: PLR0913  # one parameter per option
    hosts_path: Annotated[
        Path, typer.Argument(metavar="HOSTS.TOML", help="The machines and how to reach them.")
    ],
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN.TOML", help="Run file, or program (.py), relative to each checkout."
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENTS]", help="Of the program; options after --."),
    ] = None,
    overrides: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint.")
    ] = False,
    max_restarts: RestartsOption = 0,
    copy: Annotated[
        bool,
        typer.Option("--copy", help="First copy run file or program from here to all machines."),
    ] = False,
    more: Annotated[
        list[Path] | None,
        typer.Option(
            "--with", metavar="FILE", help="Copy a file or folder too, such as a module or data."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check run file and settings, print the commands, and exit."
        ),
    ] = False,
    show: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Machine that shows progress; by default the first."),
    ] = None,
) -> None:
    """Train on several machines: runs `thinpipe train` or `run` on each, over ssh."""
    settings = [word for override in overrides or [] for word in ("--set", override)]
    start = Start(
        run, settings, tuple(arguments or ()), resume=resume, max_restarts=max_restarts, show=show
    )
    try:
        hosts = load_hosts(hosts_path)
        start.check()
        files = files_to_copy(start, more or []) if copy or more else []
        commands = ssh_commands(hosts, start)
        if dry_run:
            _show_launch(hosts, commands, start, overrides or [], files)
            return
        if files:
            copy_files(hosts, files)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # output closed: end, and thereby all hosts
        sys.exit(run_commands(hosts, commands))
    except (ValueError, OSError) as error:
        reject(error)


def _show_launch(
    hosts: HostsConfig,
    commands: Mapping[str, Sequence[str]],
    start: Start,
    overrides: Sequence[str],
    files: Sequence[Path],
) -> None:
    network = _check(hosts, start, overrides)
    print("\n\n".join(format_command(command) for command in commands.values()))
    if rendezvous(hosts) != hosts.endpoint:
        print_error(f"note: {hosts.endpoint} is {rendezvous(hosts)} by this machine's ssh config")
    if files:
        print_error(f"copied first, to every machine: {shlex.join(map(str, files))}")
    if len(hosts.host) == 1:
        return
    named = {h.name: network.key_file or h.environment.get(KEY_FILE) for h in hosts.host}
    key = next((name for name in named.values() if name), None)
    if not files:
        own = " and ".join([start.run, *([key] if key else [])])
        copy = f"--copy{f' --with {shlex.quote(key)}' if key else ''}"
        print_error(f"note: every machine reads its own copy of {own}: {copy} sends them from here")
    without = [name for name, file in named.items() if not file]
    if without and not network.trusted:
        print_error(f"note: for {', '.join(without)}: {NO_KEY}")


def _check(hosts: HostsConfig, start: Start, overrides: Sequence[str]) -> NetworkConfig:
    path = user_path(start.run)
    if not path.exists():
        what = "it was" if start.is_program else "the settings were"
        print_error(f"note: {start.run} is not on this machine, so {what} not checked")
        return NetworkConfig()
    if not start.is_program:
        return check_run(hosts, start.run, overrides).network
    needs = look_at(path, start.arguments)
    check_shares(hosts, start.run, needs.world_size)
    return needs.network


def check_run(hosts: HostsConfig, run: str, overrides: Sequence[str]) -> RunConfig:
    """Report here the errors that every machine would report; needs the run file here."""
    config = load_config(user_path(run), overrides)
    placed, names = config.pipeline.placement, [host.name_in_run for host in hosts.host]
    if placed and len(names) > 1:
        check_hosts(hosts_by_rank(placed), names, f"the machines of the hosts file ({run})")
    check_shares(hosts, run, config.world_size, hosts_by_rank(placed))
    return config
