"""Options that commands share, and how usage errors are reported."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from typer.main import get_command

from thinpipe.launch.config.errors import known_keys, remedy
from thinpipe.launch.host.interfaces import parse_endpoint
from thinpipe.launch.host.packages import explain

USAGE_ERROR = 2  # as of argparse and click

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated."),
]

RestartsOption = Annotated[
    int, typer.Option(min=0, help="Restarts after a failure, from the newest checkpoint.")
]

RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Ranks of this machine, if machines have unequal shares."
    ),
]

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NUMBERS = (*PLACE, "MASTER_PORT", "OMP_NUM_THREADS")
"""Variables of the environment that launchers set."""
_OWN = ("THINPIPE_CACHE", "THINPIPE_KEY_FILE", "THINPIPE_NAME")
"""ThinPipe's variables that users set."""
_MISSPELT = 0.82
"""Likeness of a variable to one of them: THINPIPE_KEY is near, THINPIPE_HOST is not."""

# By its version, typer builds on click or on a copy of it, so the name is not importable.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def run_app(
    app: typer.Typer, arguments: Sequence[str] | None = None, *, program: str | None = None
) -> NoReturn:
    """Run a command line, by default this process's, and end the process."""
    try:
        command: Any = get_command(app)
        hide_types_of_flags(command)
        sys.exit(command(arguments, prog_name=program, standalone_mode=False))
    except _UsageError as error:
        _end(_explain(error))


@dataclass(frozen=True)
class Machines:
    """On how many machines a run is, and where they meet, as the options say."""

    count: int = 1
    rdzv: str | None = None
    ranks: int | None = None
    max_restarts: int = 0
    join: str | None = None
    """The `host:port` of a run that is under way."""

    @property
    def alone(self) -> bool:
        return self.count == 1 and self.rdzv is None and self.join is None

    def leave_place(self) -> None:
        """Told where machines meet, this process starts ranks and is none, though its environment
        gives it a place, as that of `thinpipe shaped`.
        """
        if not self.alone and not started_by_torch():
            for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)

    def check(self, *, meet: bool = True) -> None:
        """Reject several machines without a place to `meet`, and shares of one.

        Raises:
            ValueError: naming option and remedy.
        """
        if self.join is not None:
            parse_endpoint(self.join, "--join")
            others = {"--nnodes": self.count > 1, "--rdzv": self.rdzv}
            for option, given in {**others, "--max-restarts": self.max_restarts}.items():
                if given:
                    raise ValueError(f"{option}: not with --join, which needs no more; remove it")
        if self.count > 1 and self.rdzv is None and meet:
            raise ValueError(
                f"--nnodes = {self.count}: give one of the machines: --rdzv host0:29500"
            )
        if self.rdzv is not None:
            parse_endpoint(self.rdzv)
        if self.ranks is not None and self.alone:
            raise ValueError(
                f"--ranks = {self.ranks}: without --nnodes and --rdzv all ranks run here; add "
                "them, or remove --ranks"
            )


def is_rank() -> bool:
    """Whether this process is one: torchrun and `run_local` set its environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_torch() -> bool:
    """Whether torch's agent, torchrun's or ours, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_environment() -> None:
    """Reject launchers' variables that are not numbers, and those of ThinPipe that are misspelt.

    Raises:
        ValueError: naming variable, value and remedy.
    """
    for name in [] if "RANK" in os.environ else os.environ:  # ranks have variables of ours
        near = get_close_matches(name, _OWN, n=1, cutoff=_MISSPELT)
        if near and name.startswith("THINPIPE_") and name not in _OWN:
            raise ValueError(f"{name} = {os.environ[name]!r}: no such variable; set {near[0]}")
    numbers = {}
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value and name == "OMP_NUM_THREADS":  # of several, those of nested loops follow
            value = value.partition(",")[0].strip()
        if value is not None and not value.isdecimal():
            raise ValueError(f"{name} = {value!r}: give a whole number, or unset {name}")
        numbers[name] = None if value is None else int(value)
    port = numbers["MASTER_PORT"]
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT = {port}: use 1 to 65535, of a port that is free")
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank is not None and world is not None and rank >= world:
        raise ValueError(
            f"RANK = {rank} with WORLD_SIZE = {world}: ranks count from 0; correct one of the two"
        )


def share_of(world: int, machines: int, ranks: int | None) -> int:
    """Ranks of this machine: those given, or as many as each other has.

    Raises:
        ValueError: it cannot have so many, or they cannot be shared evenly.
    """
    if ranks is not None:
        most = world - machines + 1
        if ranks > most:
            raise ValueError(
                f"--ranks = {ranks}: of {world} ranks on {machines} machines one has at most "
                f"{most}; correct --ranks or --nnodes"
            )
        return ranks
    if world % machines:
        raise ValueError(
            f"--nnodes = {machines}: {world} ranks (stages x replicas) cannot be shared evenly by "
            "that many machines; change the stages, the replicas or --nnodes, or give each its "
            "--ranks"
        )
    return world // machines


def hide_types_of_flags(command: Any) -> None:
    """A flag takes no value, so help shows none."""
    shown_by = command.get_help_option(command.context_class(command))
    for parameter in (*command.params, shown_by):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        hide_types_of_flags(inner)


def reject(error: Exception) -> NoReturn:
    """Report a user's error, once for all ranks of this host, and end the process."""
    _end(explain(error))


def _end(text: str) -> NoReturn:
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if text and (local_rank == "0" or not local_rank.isdecimal()):
        sys.stderr.write(f"error: {text}\n")  # a whole line: ranks share the terminal
    sys.exit(USAGE_ERROR)


def _explain(error: Any) -> str:
    """The problem and its remedy; empty if help was shown instead."""
    message = error.format_message().rstrip(".")
    wrong = error.__cause__
    if isinstance(wrong, ValidationError):
        detail = wrong.errors()[0]
        return f"{_name(error.param)} = {detail['input']}: {remedy(detail).rstrip('.')}"
    if near := getattr(error, "possibilities", None):
        return f"{error.option_name}: no such option; did you mean {' or '.join(near)}?"
    if (extra := re.fullmatch(r"Got unexpected extra argument.*? \((.*)\)", message)) is not None:
        return (
            f"{extra[1]}: unexpected argument; put text with spaces in quotes, and write "
            "--set a.b=c without spaces, or remove it"
        )
    if (wrong_command := re.fullmatch(r"No such command '(.*)'", message)) is not None:
        return f"{message}; {_meant(wrong_command[1], error.ctx.command.commands)}"
    return f"{message}; --help lists arguments and options" if message[-1:] not in "?" else message


def _meant(word: str, commands: Iterable[str]) -> str:
    if word in ("version", "help"):
        return f"did you mean --{word}?"
    return known_keys(word.lower(), commands)


def _name(parameter: Any) -> str:
    """An option as typed, an argument as help shows it."""
    written = str(parameter.opts[0])
    return written if written.startswith("-") else str(parameter.metavar)
