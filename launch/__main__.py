"""`thinpipe` and `python -m launch`: a package that is missing is one line, not a traceback."""

import os
import sys

from launch.packages import explain


def main() -> None:
    """Run the command line."""
    try:
        from launch.cli import main as run_command_line  # imports packages that may be missing

        run_command_line()
    except ImportError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, f"error: {explain(error)}\n".encode())
        sys.exit(2)


if __name__ == "__main__":
    main()
