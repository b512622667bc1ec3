"""Output that nobody can take any more is no reason to end: a closed terminal, a full disk."""

import contextlib
import io
import os
import sys
import threading
from typing import Any, NoReturn

from thinpipe.launch.host.scratch import remove_scratch_folder


class _Output(io.FileIO):
    """Output that is lost where it cannot be written."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            if (written := super().write(data)) is not None:
                return written
        return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Have all that this process prints go nowhere once its output is gone.

    Streams that somebody has replaced, as notebooks do, are left alone.
    """
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            with contextlib.suppress(OSError):
                stream.flush()
            output = io.BufferedWriter(_Output(fd, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(
                output, stream.encoding, stream.errors, line_buffering=stream.line_buffering
            ))  # fmt: skip


def print_error(text: str) -> None:
    """Write whole lines at once: all ranks of a machine share its terminal."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def end_now(code: int, text: str = "") -> NoReturn:
    """End this process from any thread, after a last line.

    Nothing else is cleaned up: that involves peers and would hang, and threads that still wait
    inside torch would abort the process.
    """
    if text:
        print_error(text)
    if threading.current_thread() is threading.main_thread():  # which may hold a stream's lock
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
            sys.stderr.flush()
    remove_scratch_folder()
    os._exit(code)
