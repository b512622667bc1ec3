"""The command line: `thinpipe train run.toml`.

Nothing here imports torch before it is needed: help and mistakes are answered at once.
"""

import gc
import io
import json
import logging
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command as as_command

from thinpipe.launch import completion
from thinpipe.launch.config.cli_options import (
    Machines,
    RanksOption,
    RestartsOption,
    SetOption,
    check_environment,
    hide_types_of_flags,
    is_rank,
    reject,
    run_app,
)
from thinpipe.launch.config.toml import ConfigError, read_tree
from thinpipe.launch.host.packages import is_compiled, versions
from thinpipe.launch.host.scratch import use_scratch_folder
from thinpipe.launch.host.signals import leave_first_process
from thinpipe.launch.host.terminal import outlive_terminal
from thinpipe.launch.net.ranks import fork_server

_TABLE = {
    "key": "net.overlay.cli:key",
    "export": "trained.cli:export_model",
    "generate": "trained.cli:generate_text",
    "init": "starter.cli:init",
    "launch": "start_hosts:launch_on_hosts",
    "report": "run.report:report",
    "plan": "plan.cli:plan",
    "stop": "stop:stop",
    "trace": "plan.trace:trace",
    "watch": "view.watch.cli:watch",
    "doctor": "doctor.cli:doctor",
    "shaped": "lab.cli:shaped",
}
"""Commands that are imported when they are called."""
_OWN_OPTIONS_FIRST: Any = {"allow_interspersed_args": False}
_PASS_ON = ("run", "shaped")  # commands whose arguments are another command's
_OBJECTS = 100_000
"""Between two searches for garbage: imports leave none, and took a fifth longer with 700."""
_NEAR = 0.7  # likeness of an option to the one that was meant: --lr is not near --rdzv


class _Commands(TyperGroup):
    """All commands; until one of the table is called, `completion.json` stands in for it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        listed = json.loads(completion.LIST.read_text(encoding="utf-8"))
        self._options = {name: command.get("options") for name, command in listed.items()}
        stand_ins: Any = as_command(completion.skeleton(listed))
        for name in listed:
            self.commands[name] = self.commands.pop(name, stand_ins.commands[name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load a command, unless it has no such option."""
        name, *rest = args
        options = self._options.get(name)
        if options is not None and name not in _PASS_ON:
            _check_options(rest, options)
        if name in _TABLE:
            self.commands[name] = load(name)
        return super().resolve_command(ctx, args)


def load(name: str) -> Any:
    """A command of the table."""
    module, _, function = _TABLE[name].partition(":")
    found = getattr(import_module(f"thinpipe.launch.{module}"), function)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command(name, context_settings=_OWN_OPTIONS_FIRST if name in _PASS_ON else None)(
            found
        )
        found = alone
    command: Any = as_command(found)
    command.name = name
    hide_types_of_flags(command)
    return command


def all_commands() -> dict[str, Any]:
    """Every command, loaded."""
    group: Any = as_command(app)
    return {**group.commands, **{name: load(name) for name in _TABLE}}


def _check_options(words: list[str], options: dict[str, Any]) -> None:
    """Reject an option that a command does not have.

    Its parser would too, once the command is imported.
    """
    known = {"--help": {"flag": True}, **options}
    skip = False
    for word in words:
        if word == "--":
            return
        name, equals, _ = word.partition("=")
        if word.startswith("--") and not skip and name not in known:
            near = get_close_matches(name, options, cutoff=_NEAR)
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them"
            if not near and "--set" in options:
                hint += "; settings of the run file are given as in --set train.lr=1e-3"
            reject(ConfigError(f"{name}: no such option; {hint}"))
        skip = not skip and name in known and not equals and not known[name]["flag"]


app = typer.Typer(
    name="thinpipe",
    cls=_Commands,
    help="Train transformers over slow networks, with every link compressed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Resume from the newest checkpoint in the run folder.")
]
ShowOption = Annotated[
    int,
    typer.Option(
        "--show",
        metavar="N",
        min=-1,
        help="Local rank that shows progress (-1: none); with --dry-run, how many samples to show.",
    ),
]
NodesOption = Annotated[
    int, typer.Option(min=1, help="Number of machines; run the same command on each.")
]
JoinOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Join a run under way, as the replica that it lacks."),
]
RendezvousOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Rendezvous address, on one of the machines."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the versions that peers compare, and exit.",
        ),
    ] = False,
) -> None:
    """Train transformers over slow networks, with every link compressed."""


@app.command()
def train(  # noqa: PLR0913  # one parameter per option
    config_path: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="Run file.")],
    overrides: SetOption = None,
    resume: ResumeOption = False,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="With --resume: step of the checkpoint to use."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the run needs of memory, and exit.")
    ] = False,
    show: ShowOption = 0,
    nnodes: NodesOption = 1,
    rdzv: RendezvousOption = None,
    ranks: RanksOption = None,
    max_restarts: RestartsOption = 0,
    join: JoinOption = None,
) -> None:
    """Train. Starts all ranks on this machine, or with --nnodes its share of them.

    Under torchrun it runs a single rank.
    """
    machines = Machines(nnodes, rdzv, ranks, max_restarts, join)
    try:
        machines.check(meet=not dry_run)
        machines.leave_place()
        check_environment()
        tree = read_tree(config_path, overrides or [])
        if join is not None and resume:
            raise ConfigError("--resume: not with --join, which takes all from the run; remove it")
        if step is not None and not resume:
            raise ConfigError(f"--step = {step}: needs --resume; add it, or remove --step")
    except ValueError as error:
        reject(error)
    if not dry_run:
        _warm_up(f"reading {config_path}", show=show, lean=join is not None and _is_lean(tree))
    from thinpipe.launch.checkpoint.resume import Resume
    from thinpipe.launch.start import start_run

    wanted = Resume(resume, step)
    start_run(main, config_path, overrides or [], machines, wanted, show=show, dry_run=dry_run)


@app.command("run", context_settings=_OWN_OPTIONS_FIRST)
def run_script(  # one parameter per option
    script: Annotated[
        Path, typer.Argument(metavar="PROGRAM.PY", help="Program that makes a thinpipe.Run.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Of the program.")
    ] = None,
    show: ShowOption = 0,
    nnodes: NodesOption = 1,
    rdzv: RendezvousOption = None,
    ranks: RanksOption = None,
    max_restarts: RestartsOption = 0,
) -> None:
    """Run your own Python program on all ranks. Options go before the program."""
    machines = Machines(nnodes, rdzv, ranks, max_restarts)
    try:
        machines.check()
        machines.leave_place()
        check_environment()
    except ValueError as error:
        reject(error)
    _warm_up(f"looking at {script}", show=show)
    from thinpipe.launch.start import start_program

    start_program(main, script, arguments or [], machines, show=show)


def _is_lean(tree: Mapping[str, Any]) -> bool:
    """Whether ranks of a newcomer need no compiler of torch's: it is told its memory."""
    pipeline, model = tree.get("pipeline", {}), tree.get("model", {})
    if not (isinstance(pipeline, dict) and isinstance(model, dict)):
        return False
    # torch's checkpointing imports it, too
    return not pipeline.get("cuts") and not model.get("activation_checkpointing")


def _warm_up(doing: str, *, show: int, lean: bool = False) -> None:
    """Let the process that ranks are forked from import while this one checks; say so."""
    if is_rank():
        return
    leave_first_process()  # before any other is started
    outlive_terminal()
    if show >= 0 and sys.stdout.isatty():
        once = "" if is_compiled("torch") else "; Python compiles it once, for up to a minute"
        print(f"{doing}, loading torch{once}", flush=True)
    try:
        use_scratch_folder()
    except OSError as error:
        reject(ConfigError(f"no temporary files: {error.strerror}; set TMPDIR"))
    fork_server.start(lean=lean)
    gc.set_threshold(_OBJECTS)


def main() -> None:
    """The command line of this process; `launch/__main__.py` calls it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the user's locale lacks is shown as ?
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # dumps schedules
    run_app(app, program="thinpipe")  # whose name shell completion asks by


if __name__ == "__main__":
    completion.LIST.write_text(completion.written(all_commands()), encoding="utf-8")
