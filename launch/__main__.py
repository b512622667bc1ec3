"""`thinpipe` and `python -m thinpipe`: a missing package is reported in one line."""

import os
import sys

from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.terminal import print_error

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_SPINS = "10000"


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # our messages say it without C++ stacks
    _wait_briefly()
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a size: rich would print nothing
        del os.environ["COLUMNS"]
    try:
        from thinpipe.launch.cli import main as run_command_line  # its packages may be missing

        run_command_line()
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


if __name__ == "__main__":
    main()
