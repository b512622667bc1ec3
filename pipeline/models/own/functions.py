"""Functions of the user's own, by name ("module:function") in a run file, or given as they are.

Those that a program defines are wanted without the run that it would begin.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

MAIN = "__main__"
"""The module of what a program defines."""

LOOKING: ContextVar[bool] = ContextVar("looking", default=False)
"""Whether the program is only looked at: `NotRun` is raised where its run would begin."""


class NotRun(BaseException):
    """Raised where a run would begin, while a program is only looked at."""


def load_function(name: str, setting: str, program: Sequence[str] = ()) -> Callable[..., Any]:
    """Import `module:function`, from what is installed or else from the current folder.

    What `program`, a file and arguments, defined itself is taken from there.

    Raises:
        ValueError: there is no such module or function, or importing it fails; `setting` is what
            the message begins with.
    """
    where = f'{setting} = "{name}"'
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f'{where}: write it as "module:function", as in "mymodel:build"')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file there replaces nothing that is installed
    if module_name == MAIN and program:
        try:
            main = defined_by(program)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
        return _member(main, function_name, where)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{where}: {module_name} cannot be imported: {error}; install that, or correct the "
                "name"
            ) from error
        raise ValueError(
            f"{where}: no module {error.name}, neither installed nor in {os.getcwd()}; start "
            "where the file is, or install it"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{where}: importing {module_name} fails: {type(error).__name__}: {error}; correct it "
            f"(python -c 'import {module_name}' shows where)"
        ) from error
    return _member(found, function_name, where)


def _member(found: Any, name: str, where: str) -> Callable[..., Any]:
    module = found.__name__
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f'did you mean "{near[0]}"?' if near else "name one of its functions"
            raise ValueError(f"{where}: {module} has no {name}; {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{where}: {name} is not a function")
    return found  # type: ignore[no-any-return]


def name_of(function: Callable[..., Any]) -> str:
    """`module:function`, to record what was given as it is."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}:{name}"


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
