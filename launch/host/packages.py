"""How to install a missing package. Imports none of them."""

import errno
import importlib.util
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

EXTRAS: Mapping[str, str] = {
    "bitsandbytes": "quantized",
    "matplotlib": "share",
    "optimi": "bf16",
    "peft": "hf",
    "tensorboard": "tensorboard",
    "tokenizers": "hf",
    "trackio": "trackio",
    "transformers": "hf",
    "wandb": "wandb",
}
"""Optional packages, and the extra of ThinPipe that installs each."""


_REMEDIES = {
    errno.ENOENT: "; correct the path, or create its folder first",
    errno.ENOTDIR: "; a file is where a folder should be: correct the path",
    errno.EISDIR: "; it is a folder: name a file",
    errno.EACCES: "; correct its owner or mode (ls -l), or name another place",
    errno.EPERM: "; correct its owner or mode (ls -l), or name another place",
    errno.EROFS: "; name a place that can be written",
    errno.ENAMETOOLONG: "; use a shorter name",
}

_OWN = ("thinpipe", "pipeline", "aqsgd", "gradcomp", "launch")
"""Ours, and the folders of its source: never names of packages to install."""


def explain(error: Exception) -> str:
    """An error as one line; for a missing package, with the command that installs it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}{_REMEDIES.get(error.errno or 0, '')}"
    module = getattr(error, "name", None) or ""
    package = module.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package:
        return str(error)
    if package in _OWN:
        return (
            f"the installation of ThinPipe is damaged (no module {module!r}); install it again, "
            f"from its source folder or with {install('thinpipe', '--force-reinstall')}"
        )
    if (own := _imported_from_here(package)) is not None:
        return f"{own} was imported in place of the package {package!r}; rename it or move it away"
    extra = EXTRAS.get(package)
    if extra is None:
        return f"the package {package!r} is not installed; run {install(package)}"
    return (
        f"the package {package!r} (extra {extra!r}) is not installed; run "
        f"{install(f'thinpipe[{extra}]')}"
    )


def first_line(error: BaseException) -> str:
    """Of an error's message; without one, the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def install(requirement: str, *options: str) -> str:
    """The command that installs into the environment of this process."""
    return f"`{shlex.join([sys.executable, '-m', 'pip', 'install', *options, requirement])}`"


def _imported_from_here(package: str) -> Path | None:
    """The file of an imported package that lies directly in the current folder: a user's own."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    place = path.parent if path.name == "__init__.py" else path
    return place if place.parent == Path.cwd() else None


def versions() -> dict[str, str]:
    """Versions that a run records and peers compare."""
    from importlib.metadata import version  # imports slowly

    return {
        "thinpipe": version("thinpipe"),
        "torch": version("torch").split("+")[0],
        "python": platform.python_version(),
    }


def is_compiled(package: str) -> bool:
    """Whether Python has kept it compiled: if not, a first import of torch can take a minute."""
    found = importlib.util.find_spec(package)
    return found is None or found.cached is None or Path(found.cached).exists()


def require(package: str) -> None:
    """ModuleNotFoundError unless it is installed, before a process that imports it is started."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def check_writers(tools: Iterable[str]) -> None:
    """ValueError, naming the extra, unless the packages of `report.writers` are installed."""
    for tool in tools:
        try:
            require(tool)
        except ModuleNotFoundError as error:
            raise ValueError(f'report.writers has "{tool}": {explain(error)}') from None
