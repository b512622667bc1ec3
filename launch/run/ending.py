"""How a rank's process ends: what it says, and its exit code."""

import os
import sys
import traceback
from typing import NoReturn

from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.state import saved_so_far
from thinpipe.launch.config.cli_options import USAGE_ERROR, refuse
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.distributed.handshake import HandshakeError
from thinpipe.launch.distributed.session import PeerError, TerminatedError
from thinpipe.launch.host.packages import explain

FAILED, INTERRUPTED = 1, 130

OURS = (ConfigError, CheckpointError, HandshakeError)
"""Errors whose message says it all."""


def end_done() -> NoReturn:
    """End the process of a rank that has done its work."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads still wait inside torch, which would abort the process


def end_failed(
    error: BaseException, config: RunConfig | None, *, clear: tuple[type[Exception], ...] = OURS
) -> NoReturn:
    """Say why the rank failed, and end the process: clean-up that involves peers would hang.

    Of errors in `clear`, the message is shown; of others, where they were raised.
    """
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    rank, code = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "it", FAILED
    sys.stdout.flush()
    if isinstance(error, PeerError):
        print_error(f"{rank}: {error}")
    elif isinstance(error, clear):
        try:
            refuse(error)
        except SystemExit:
            code = USAGE_ERROR
    elif isinstance(error, ImportError):
        print_error(f"{rank}: {explain(error)}")
    elif isinstance(error, TerminatedError):
        code = error.code
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print_error(error.code)
    else:
        print_error(f"{rank} failed:\n{''.join(traceback.format_exception(error))}")
    quiet = isinstance(error, (*clear, ImportError, SystemExit))
    if first_here and config is not None and not quiet:
        print_error(saved_so_far(config))
    sys.stderr.flush()
    os._exit(code)


def print_error(text: str) -> None:
    """Write whole lines at once: all ranks of a machine share its terminal."""
    os.write(2, f"{text}\n".encode())
