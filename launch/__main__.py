"""`thinpipe` and `python -m thinpipe.launch`: a missing package is reported in one line."""

import os
import sys

from thinpipe.launch import completion
from thinpipe.launch.host.packages import explain

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    if completion.is_asked():
        completion.answer()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # our messages say it without C++ stacks
    try:
        from thinpipe.launch.cli import main as run_command_line  # its packages may be missing

        run_command_line()
    except ImportError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, f"error: {explain(error)}\n".encode())
        sys.exit(2)
    except KeyboardInterrupt:  # before there are ranks, which say what they saved
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
