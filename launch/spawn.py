"""Starts the ranks of a run on this machine, with torch's elastic agent: what torchrun uses."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PARENT = "THINPIPE_PARENT"
"""Environment variable that tells a local rank which process it must not outlive."""

_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def started_by_launcher() -> bool:
    """Whether this process is a rank already: torchrun and `run_local` set its place."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_local(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m launch <arguments>` as that many ranks; return the exit code.

    The ranks talk over loopback. If one fails, the others are ended; if this process is killed,
    they end too.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(usable_cores(), processes)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[PARENT] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say it better
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"thinpipe-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "launch", *arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def usable_cores() -> int:
    """Cores that this process may run on: a container or `taskset` can allow fewer than exist."""
    if sys.platform.startswith("linux"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(cores: int, processes: int) -> int:
    """Threads that compute in each rank.

    From four cores per rank on, one is left to the threads that move and code messages: a compute
    thread that shares its core makes all others wait for it.
    """
    share = cores // processes
    return share - 1 if share >= 4 else max(1, share)


def keep_freed_memory() -> bool:
    """Have this process reuse freed memory up to a gigabyte at once instead of returning it.

    By default glibc maps every tensor above 32 MB anew, and the kernel clears it page by page: for
    an operation that only passes over its data that takes longer than the operation. Call before
    the first large allocation. Returns False, with nothing changed, where the user has set malloc's
    thresholds, or the C library has no such settings.
    """
    chosen = any(name in os.environ for name in _MALLOC_VARIABLES)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not sys.platform.startswith("linux"):
        return False
    trim_threshold, mmap_threshold, kept = -1, -3, 1 << 30
    return bool(mallopt(mmap_threshold, kept) and mallopt(trim_threshold, kept))


def end_with_parent() -> None:
    """Ask Linux to end this rank when the process that started it dies, however it dies."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        sys.exit(1)
