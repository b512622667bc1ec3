"""Memory that this machine has free, what computes here, and how busy its cores are."""

import platform
import time
from pathlib import Path

import psutil
import torch

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


def free_memory() -> int:
    """Bytes that this machine can allocate without swapping."""
    available: int = psutil.virtual_memory().available
    return available


def arithmetic(device: torch.device) -> str:
    """What computes on this device: where it is equal, so are results, to the last bit."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line[:10] == "model name")
    processor = next(names, platform.machine())
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []


class BackgroundLoad:
    """Measures what other processes on this machine have computed since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float:
        """How many cores other processes have kept busy on average."""
        wall_s, busy_s, own_s = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy_s - own_s) / wall_s

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, kind, 0.0) for kind in _BUSY)
        return time.perf_counter(), busy_s, time.process_time()
