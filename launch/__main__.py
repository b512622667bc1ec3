"""`thinpipe` and `python -m thinpipe.launch`: a missing package is reported in one line."""

import os
import sys

from thinpipe.launch import completion
from thinpipe.launch.distributed import fork_server
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.scratch import use_scratch_folder
from thinpipe.launch.host.signals import leave_first_process
from thinpipe.launch.host.terminal import outlive_terminal, print_error

INTERRUPTED = 130
_SPINS = "10000"
_STARTS_NOTHING = {"--dry-run", "--help"}


def main() -> None:
    """Run the command line."""
    if completion.is_asked():
        completion.answer()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # our messages say it without C++ stacks
    _wait_briefly()
    try:
        _run()
    except ImportError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(f"error: {explain(error)}")
        sys.exit(2)
    except KeyboardInterrupt:  # before there are ranks, which say what they saved
        sys.exit(INTERRUPTED)


def _wait_briefly() -> None:
    """Have compute threads that wait for each other spin for microseconds, then sleep.

    By default they spin for milliseconds. Where other processes use the cores too, the thread that
    is waited for does not get one: a step took 7 s instead of 2 s. Alone, it takes as long.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def _run() -> None:
    trains = sys.argv[1:2] in (["train"], ["run"]) and not _STARTS_NOTHING & {*sys.argv}
    if trains and "RANK" not in os.environ:
        leave_first_process()
        outlive_terminal()
        try:
            use_scratch_folder()
        except OSError as error:
            print_error(f"error: no temporary files: {error.strerror}; set TMPDIR")
            sys.exit(2)
        fork_server.start()
    from thinpipe.launch.cli import (
        main as run_command_line,  # imports packages that may be missing
    )

    run_command_line()


if __name__ == "__main__":
    main()
