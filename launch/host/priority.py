"""A process that works only while others do not."""

import contextlib
import os
from pathlib import Path

_LEAST = 19


def give_way() -> None:
    """Let this process have only the CPU time that others leave.

    Linux shares CPUs among sessions first (`sched_autogroup`), and `nice` counts only within one.
    So a process that leads a session makes all of that give way; others would slow their user's.
    """
    os.nice(_LEAST)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such kernel
            Path("/proc/self/autogroup").write_text(str(_LEAST), encoding="ascii")
