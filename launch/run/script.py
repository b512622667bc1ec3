"""`thinpipe run mine.py`: finds out how many ranks a program wants, and runs it as each of them."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.net.ranks.fork_server import START_METHOD
from thinpipe.launch.run.ending import end_failed
from thinpipe.launch.run.program import RunRequested, run_program
from thinpipe.pipeline.models.own.functions import LOOKING

_LOOK_S = 600.0  # how long a program may take to reach its `Run`


class LaunchSpec(NamedTuple):
    """What a program wants to be started with."""

    world_size: int
    join_s: float
    network: NetworkConfig


def look_at(script: Path, arguments: Sequence[str]) -> LaunchSpec:
    """Run a program, in a process of its own, up to where its `Run` is made.

    Raises:
        ConfigError: it cannot be read, fails before, makes none, or does not get there in time.
    """
    if script.suffix == ".toml":
        raise ConfigError(f"{script}: a run file; use `thinpipe train {script}`")
    if not script.is_file():
        raise ConfigError(
            f"{script}: a folder; name the program in it"
            if script.is_dir()
            else f"{script}: no such file, seen from {Path.cwd()}; correct the path"
        )
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context: Any = multiprocessing.get_context(START_METHOD)
    process = context.Process(target=_look, args=(str(script), list(arguments), sender))
    process.start()
    sender.close()
    try:
        found: LaunchSpec | str = (
            f"it made no thinpipe.Run within {_LOOK_S:.0f} s; make the Run first, and leave what "
            "takes long (data, downloads) for after it"
        )
        if receiver.poll(_LOOK_S):
            found = receiver.recv()
        else:
            process.kill()
    except EOFError:
        found = (
            "it ended before making a thinpipe.Run; make one with thinpipe.Run(folder, pipeline, "
            "optimizer), or run it with python"
        )
    process.join()
    if isinstance(found, str):
        raise ConfigError(f"{script}: {found}")
    return found


def run_as_rank(script: Path, arguments: Sequence[str]) -> NoReturn:
    """Run the program as one rank, and end the process."""
    run_program(lambda: _execute(str(script), arguments))


def _look(script: str, arguments: Sequence[str], sender: Connection) -> None:
    LOOKING.set(True)
    try:
        _execute(script, arguments)
    except RunRequested as wanted:
        config = wanted.config
        sender.send(LaunchSpec(config.world_size, config.pipeline.peer_timeout_s, config.network))
    except BaseException as error:
        sender.send("it failed before making a thinpipe.Run; see above")
        end_failed(error, None)


def _execute(script: str, arguments: Sequence[str]) -> None:
    """As `python script arguments` would."""
    multiprocessing.set_start_method(None, force=True)  # is ours
    os.environ.pop("PYTHONSAFEPATH", None)  # of the server that forked this process
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    source = Path(script).read_bytes()
    exec(compile(source, script, "exec"), main.__dict__)
