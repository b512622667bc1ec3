"""Memory that this machine has free, what computes here, its cores and how busy they are."""

import contextlib
import os
import platform
import re
import time
from pathlib import Path
from zlib import crc32

import psutil
import torch

_CHOOSE_KERNELS = ("MKL_CBWR", "MKL_ENABLE", "MKL_DEBUG", "ONEDNN_", "DNNL_", "OPENBLAS_CORETYPE")
"""Of torch's libraries; torch's own choice is its capability."""
_CGROUP, _PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_ALL_BUSY, _MANY = 0.9, 0.25
"""Shares of the cores: no idle ones are left, and others use many of them."""


def usable_cores() -> int:
    """Cores that this process may keep busy.

    Affinity (`taskset`, cpusets) and the quota of a container can allow fewer than the machine has.
    """
    quotas = [max(1, int(quota)) for quota in map(_quota, cgroup_folders("cpu")) if quota]
    return min([len(os.sched_getaffinity(0)), *quotas])


def rank_threads(processes: int) -> int:
    """Compute threads of each of `processes` ranks on this machine: OMP_NUM_THREADS if set to a
    number, else `threads_per_rank`.
    """
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # more: nested levels
    if re.fullmatch(r" *0*[1-9]\d* *", setting):
        return int(setting)
    return threads_per_rank(usable_cores(), processes)


def threads_per_rank(cores: int, processes: int) -> int:
    """Compute threads of each rank.

    With four cores per rank or more, one is reserved for codec and transfer threads: a compute
    thread that shares its core delays all others.
    """
    share = cores // processes
    return share - 1 if share >= 4 else max(1, share)


def has_spare_core(cores: int, processes: int, threads: int) -> bool:
    """Whether every rank has a core for codec and transfer threads besides its compute threads."""
    return cores >= processes * (threads + 1)


def free_memory() -> int:
    """Bytes that this process can allocate without swapping, on this machine and in its container.

    Cached files count as free, mapped ones too: the kernel drops them when memory is needed.
    """
    try:
        available: int = psutil.virtual_memory().available
    except OSError:  # /proc is hidden, and nobody can tell how much others use
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rooms = [room for room in map(_room, cgroup_folders("memory")) if room is not None]
    return max(0, min([available, *rooms]))


def cgroup_folders(controller: str) -> list[Path]:
    """Where the limits of this process are, of its cgroup and all above it, for v1 and v2.

    Inside a container its own cgroup may appear as the root, whatever name the host gave it.
    """
    own = {"", controller}
    lines = (line.split(":", 2) for line in _lines(_PROC_CGROUP))
    paths = {name: path for _, names, path in lines for name in names.split(",") if name in own}
    found = []
    for name, place in (("", _CGROUP), (controller, _CGROUP / controller)):
        below = Path(paths.get(name, "/").lstrip("/"))
        found += [place / folder for folder in (below, *below.parents)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _quota(cgroup: Path) -> float | None:
    """Cores that processes in a cgroup may keep busy together; None without a limit."""
    quota, _, period = _word(cgroup / "cpu.max").partition(" ")  # v2
    if not quota:
        quota, period = (_word(cgroup / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    known = quota.isdigit() and period.isdigit() and int(period)
    return int(quota) / int(period) if known else None


def _room(cgroup: Path) -> int | None:
    """Bytes that processes in a cgroup may still allocate; None without a limit."""
    v2, v1 = ("memory.max", "memory.high"), ("memory.limit_in_bytes",)
    limits = [text for name in (*v2, *v1) if (text := _word(cgroup / name)).isdigit()]
    used = _word(cgroup / "memory.current") or _word(cgroup / "memory.usage_in_bytes")
    if not limits or not used.isdigit():
        return None
    counts = dict(line.split() for line in _lines(cgroup / "memory.stat"))
    kinds = ("inactive_file", "active_file")
    cached = sum(int(counts.get(f"total_{kind}", counts.get(kind, 0))) for kind in kinds)
    return min(map(int, limits)) - int(used) + cached


def _word(path: Path) -> str:
    return next(iter(_lines(path)), "").strip()


def arithmetic(device: torch.device) -> str:
    """What computes on this device, and all that chooses kernels: where it is equal, so are
    results, to the last bit. Containers on one processor may see unlike instruction sets of it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    processor = _of_processor("model name") or platform.machine()
    flags = crc32((_of_processor("flags") or _of_processor("Features")).encode())
    threads = torch.get_num_threads()
    chosen = (f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith(_CHOOSE_KERNELS))
    return ", ".join(
        [
            f"{processor} (flags {flags:08x})",
            torch.backends.cpu.get_cpu_capability(),
            f"{threads} thread{'s' * (threads != 1)}",
            f"torch {torch.__version__}",
            *chosen,
        ]
    )


def _of_processor(field: str) -> str:
    """Of the first one, from /proc/cpuinfo; empty where that is not known."""
    found = (line.partition(":") for line in _lines(Path("/proc/cpuinfo")))
    return next((value.strip() for name, _, value in found if name.strip() == field), "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


class BackgroundLoad:
    """Measures what other processes on this machine have computed since this was made.

    With `family`, the other children of this one's parent count as own: the ranks of a run.
    """

    def __init__(self, *, family: bool = False) -> None:
        self._family = family
        self._start = self._now()

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self._start[0]

    def cores(self) -> float:
        """How many cores other processes have kept busy on average."""
        return self._means()[1]

    def notice(self) -> str | None:
        """Whether steps wait for cores that others use."""
        (busy, others), cores = self._means(), os.cpu_count() or 1
        if busy < _ALL_BUSY * cores or others < _MANY * cores:
            return None
        return (
            f"note: other processes keep {others:.1f} of this machine's {cores} cores busy, and "
            "steps wait for cores: they take longer than they would alone"
        )

    def _means(self) -> tuple[float, float]:
        """Cores that were busy, and of them those of other processes."""
        wall_s, busy_s, own_s = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return busy_s / wall_s, max(0.0, busy_s - own_s) / wall_s

    def _now(self) -> tuple[float, float, float]:
        busy_s = 0.0
        with contextlib.suppress(OSError):  # /proc is hidden: nobody else is seen
            times = psutil.cpu_times()
            busy_s = sum(getattr(times, kind, 0.0) for kind in _BUSY)
        own_s = _family_s() if self._family else time.process_time()
        return time.perf_counter(), busy_s, own_s


def _family_s() -> float:
    total_s = 0.0
    with contextlib.suppress(OSError):  # /proc is hidden
        parent = psutil.Process().parent()
        for process in parent.children() if parent else ():
            with contextlib.suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                total_s += times.user + times.system
    return total_s
