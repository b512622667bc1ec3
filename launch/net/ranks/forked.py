"""Runs in the fork server when it starts, and in each rank that it forks.

Only the fork server imports this before there are ranks: importing it ties the process to its
parent.
"""

import gc

gc.disable()  # what is imported next stays: a fifth of the time would be spent looking at it

import os
import signal
import sys
from collections.abc import Callable, Mapping

from thinpipe.launch.host.signals import ENDING_SIGNALS
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.fork_server import PARENT, end_with_parent, name_process
from thinpipe.launch.net.ranks.network import PLACED
from thinpipe.launch.net.ranks.supervisor import supervise

end_with_parent()
os.setsid()  # Ctrl-C in a terminal reaches the launcher alone
name_process("thinpipe server")
os.environ[PARENT] = str(os.getpid())  # for the ranks
_PATH = tuple(sys.path)


def run_rank(main: Callable[[], None], environment: Mapping[str, str], *arguments: str) -> bool:
    """Call the command line's `main` with these arguments, and these variables changed.

    Returns whether the rank was lost and others go on without it.
    """
    gc.freeze()
    gc.enable()
    os.environ.update(environment)
    if PLACED in environment:  # torch's agents number hosts as they come
        ranks = environment[PLACED].split(",")
        os.environ["RANK"] = ranks[int(os.environ["LOCAL_RANK"])]
    sys.path[:] = _PATH  # not the launcher's, which may hold the user's folder
    sys.argv = ["thinpipe", *arguments]
    name_process("thinpipe wait")
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())
    return supervise(lambda: _be_rank(main))


def _be_rank(main: Callable[[], None]) -> None:
    name_process(f"thinpipe {os.environ['RANK']}")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        end_now(code if isinstance(code, int) else int(code is not None))
