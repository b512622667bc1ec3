"""How to install a missing package. Imports none of them."""

import importlib.util
import shlex
import sys
from collections.abc import Mapping

EXTRAS: Mapping[str, str] = {
    "datasets": "datasets",
    "peft": "hf",
    "tokenizers": "hf",
    "transformers": "hf",
}
"""Optional packages, and the extra of ThinPipe that installs each."""


def explain(error: Exception) -> str:
    """An error as one line; for a missing package, with the command that installs it."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package:
        return str(error)
    extra = EXTRAS.get(package)
    if extra is None:
        return f"the package {package!r} is not installed; run {install(package)}"
    return (
        f"the package {package!r} (extra {extra!r}) is not installed; run "
        f"{install(f'thinpipe[{extra}]')}"
    )


def install(requirement: str) -> str:
    """The command that installs into the environment of this process."""
    return f"`{shlex.join([sys.executable, '-m', 'pip', 'install', requirement])}`"


def require(package: str) -> None:
    """Check that a package is installed, before a process that imports it is started.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
