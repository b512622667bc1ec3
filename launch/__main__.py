"""`thinpipe` and `python -m thinpipe`: a missing package is reported in one line."""

import json
import os
import sys
import tomllib
from pathlib import Path

from thinpipe.launch import completion
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.scratch import use_scratch_folder
from thinpipe.launch.host.signals import leave_first_process
from thinpipe.launch.host.terminal import outlive_terminal, print_error
from thinpipe.launch.net.ranks import fork_server

INTERRUPTED = 130
_SPINS = "10000"


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # our messages say it without C++ stacks
    _wait_briefly()
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a size: rich would print nothing
        del os.environ["COLUMNS"]
    try:
        if "RANK" not in os.environ and _starts_ranks(sys.argv[1:]):
            _prepare()
            fork_server.start()  # imports for the ranks while this process imports and checks
        from thinpipe.launch.cli import main as run_command_line  # its packages may be missing

        run_command_line()
    except ImportError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(f"error: {explain(error)}")
        sys.exit(2)
    except KeyboardInterrupt:  # before there are ranks, which say what they saved
        sys.exit(INTERRUPTED)


def _prepare() -> None:
    """Prepare a launcher, before it starts any process."""
    leave_first_process()
    outlive_terminal()
    try:
        use_scratch_folder()
    except OSError as error:
        print_error(f"error: no temporary files: {error.strerror}; set TMPDIR")
        sys.exit(2)


def _wait_briefly() -> None:
    """Have compute threads that wait for each other spin for microseconds, then sleep.

    By default they spin for milliseconds. Where other processes use the cores too, the thread that
    is waited for does not get one: a step took 7 s instead of 2 s. Alone, it takes as long.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def _starts_ranks(words: list[str]) -> bool:
    """Whether a command line will, as far as can be said at once: a mistake starts nothing."""
    if words[:1] not in (["train"], ["run"]) or {"--dry-run", "--help"} & {*words}:
        return False
    if words[0] == "run":
        return any(map(os.path.isfile, words[1:]))
    known = json.loads(completion.LIST.read_text(encoding="utf-8"))["train"]["options"]
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    try:
        for path in (Path(word) for word in words[1:] if word.endswith(".toml")):
            tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(option in known for option in options)


if __name__ == "__main__":
    main()
