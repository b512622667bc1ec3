"""Functions of the user's own, by name ("module:function") in a run file, or given as they are."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from thinpipe.pipeline.models.own.program import MAIN, defined_by


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
