"""How a rank's process ends: what it says, and its exit code."""

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from pydantic import ValidationError

from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.state import saved_so_far
from thinpipe.launch.config.cli_options import USAGE_ERROR, reject
from thinpipe.launch.config.errors import remedy
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.terminal import end_now, print_error
from thinpipe.launch.net.ranks.failures import LOST, OUT
from thinpipe.launch.net.ranks.group import joins
from thinpipe.launch.net.ranks.handshake import HandshakeError
from thinpipe.launch.net.ranks.restarts import reject_restarts
from thinpipe.launch.net.ranks.session import PeerError, TerminatedError, speaks

FAILED, INTERRUPTED = 1, 130  # 128 + SIGINT, as shells have it

OURS = (ConfigError, CheckpointError, HandshakeError)
"""Errors whose message says it all."""
_PACKAGES = tuple(
    f"{Path(__file__).resolve().parents[2] / name}{os.sep}"
    for name in ("launch", "pipeline", "aqsgd", "gradcomp")
)
"""Where our code is."""


def end_failed(
    error: BaseException,
    config: RunConfig | None,
    *,
    clear: tuple[type[Exception], ...] = OURS,
    resume: str = "--resume",
) -> NoReturn:
    """Say why the rank failed, and end the process: clean-up that involves peers would hang.

    Of errors in `clear`, the message is shown; of others, where they were raised. `resume` is how
    whoever started the run continues it.
    """
    rank, code = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "the program", FAILED
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
    if isinstance(error, PeerError):
        if str(error):
            print_error(f"{rank}: {error}")
            _retell(error, config, resume)
    elif isinstance(error, clear):
        code = _reject(error)
    elif (words := _in_words(error)) is not None:
        print_error(f"{rank}: {words}")
    elif isinstance(error, TerminatedError):
        code = error.code
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        code = FAILED if code in (LOST, OUT) else code  # which say something else of a rank
        if isinstance(error.code, str):
            print_error(error.code)
    else:
        print_error(f"{rank} failed:\n{_trace(error)}")
    quiet = isinstance(error, (*clear, ImportError, SystemExit))
    if speaks() and config is not None and not quiet:
        print_error(_what_is_left(error, config, resume))
    end_now(code)


def _what_is_left(error: BaseException, config: RunConfig, resume: str) -> str:
    asked = isinstance(error, (TerminatedError, KeyboardInterrupt))
    if asked and joins() and not getattr(error, "has_begun", False):
        return "stopped: this machine was not in the run yet"
    return f"{'stopped: ' * asked}{saved_so_far(config.run.path, resume)}"


def _retell(error: PeerError, config: RunConfig | None, resume: str) -> None:
    """Have the run's page say what failed first: it ended before that was known."""
    if os.environ.get("RANK") == "0" and config is not None:
        from thinpipe.launch.view.report.journal import retell

        retell(config.run.path, f"{error}; {saved_so_far(config.run.path, resume)}")


def _reject(error: Exception) -> int:
    if type(error) in (ConfigError, CheckpointError):  # what the next attempt would meet too
        reject_restarts()
    with suppress(SystemExit):
        reject(error)
    return USAGE_ERROR


def _trace(error: BaseException) -> str:
    """Where an error was raised: from the program's first line there, if it is a program's."""
    place, program = error.__traceback__, _program()
    while place is not None and place.tb_frame.f_code.co_filename != program:
        place = place.tb_next
    if place is None and not (isinstance(error, SyntaxError) and error.filename == program):
        place = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, place))


def _in_words(error: BaseException) -> str | None:
    """What is wrong, and in which line of a program, if an error's message says it; else None."""
    if isinstance(error, dist.DistNetworkError):
        return "the machine that holds the run's store is gone"
    if "does not have a deterministic implementation" in str(error):
        what = str(error).partition(" does not have")[0]
        return (
            f"{what} is not deterministic on a GPU; with pipeline.deterministic = false the run "
            "goes on, and a resume is no longer bit-exact"
        )
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _program()]
    where = f"{_program()}, line {lines[-1]}: " if lines else ""
    if isinstance(error, ImportError):
        own = isinstance(error, ModuleNotFoundError) and lines
        hint = f"; a module of your own belongs next to {_program()}" if own else ""
        return f"{where}{explain(error)}{hint}"
    if isinstance(error, ValidationError):
        wrong = [(".".join(map(str, found["loc"])), found) for found in error.errors()]
        return "\n".join(
            f"{where}{error.title}: {name} = {found['input']!r}: {remedy(found)}"
            for name, found in wrong
        )
    ours = frames and frames[-1].filename.startswith(_PACKAGES)
    return f"{where}{error}" if ours and lines and isinstance(error, ValueError) else None


def _program() -> str | None:
    return getattr(sys.modules["__main__"], "__file__", None)
