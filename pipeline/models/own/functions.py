"""Functions of the user's own, by name ("module:function") in a run file, or given as they are."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Import `module:function`, from what is installed or else from the current folder.

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
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{where}: {module_name} cannot be imported: {error}") from error
        raise ValueError(
            f"{where}: no module {error.name}, neither installed nor in {os.getcwd()}; start "
            "where the file is, or install it"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{where}: importing {module_name} fails: {type(error).__name__}: {error}"
        ) from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{where}: {module_name} has no {function_name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{where}: {function_name} is not a function")
    return found  # type: ignore[no-any-return]


def name_of(function: Callable[..., Any]) -> str:
    """`module:function`, to record what was given as it is."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}:{name}"
