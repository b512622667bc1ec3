"""Definitions of a program, wanted without the run that it would begin."""

import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

MAIN = "__main__"
"""The module of what a program defines."""

LOOKING: ContextVar[bool] = ContextVar("looking", default=False)
"""Whether the program is only looked at: `NotRun` is raised where its run would begin."""


class NotRun(BaseException):
    """Raised where a run would begin, while a program is only looked at."""


def defined_by(program: Sequence[str]) -> ModuleType:
    """What a program, given with its arguments, defines until its run would begin.

    Raises:
        ValueError: it is not there, or fails before.
    """
    path = Path(program[0])
    if not path.is_file():
        raise ValueError(
            f"is defined by the program {path}, which is not here; put it there again, or give "
            "the function: thinpipe.load(run, model=function)"
        )
    found = ModuleType(MAIN)
    found.__file__ = str(path)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file there replaces nothing that is installed
    before, sys.argv = sys.argv, list(program)
    token = LOOKING.set(True)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), found.__dict__)
    except NotRun:
        pass
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"is defined by {path}, which fails before its run ({type(error).__name__}: {error}), "
            f"in {os.getcwd()}; call this where the program was started, or give the function: "
            "thinpipe.load(run, model=function)"
        ) from error
    finally:
        LOOKING.reset(token)
        sys.argv = before
    return found


def program_of(*functions: object) -> tuple[str, ...]:
    """The program that runs, with its arguments, if it defines one of these functions itself."""
    file = getattr(sys.modules[MAIN], "__file__", None)
    if file is None or all(getattr(one, "__module__", None) != MAIN for one in functions):
        return ()
    return (str(Path(file).resolve()), *sys.argv[1:])
