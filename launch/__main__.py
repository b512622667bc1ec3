"""`thinpipe` and `python -m thinpipe.launch`: a missing package is reported in one line."""

import json
import os
import sys
import tomllib
from pathlib import Path

from thinpipe.launch import completion
from thinpipe.launch.distributed import fork_server
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.scratch import use_scratch_folder

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    if completion.is_asked():
        completion.answer()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # our messages say it without C++ stacks
    try:
        if "RANK" not in os.environ and _starts_ranks(sys.argv[1:]):
            use_scratch_folder()
            fork_server.start()  # imports for the ranks while this process imports and checks
        from thinpipe.launch.cli import main as run_command_line  # its packages may be missing

        run_command_line()
    except ImportError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, f"error: {explain(error)}\n".encode())
        sys.exit(2)
    except KeyboardInterrupt:  # before there are ranks, which say what they saved
        sys.exit(INTERRUPTED)


def _starts_ranks(words: list[str]) -> bool:
    """Whether a command line will, as far as can be said at once: a mistake starts nothing."""
    if words[:1] not in (["train"], ["run"]) or {"--dry-run", "--help"} & {*words}:
        return False
    if words[0] == "run":
        return any(map(os.path.isfile, words[1:]))
    known = json.loads(completion.LIST.read_text())["train"]["options"]
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    try:
        for path in (Path(word) for word in words[1:] if word.endswith(".toml")):
            tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return all(option in known for option in options)


if __name__ == "__main__":
    main()
