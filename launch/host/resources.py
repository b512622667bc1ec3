"""Memory that this machine has free, what computes here, and how busy its cores are."""

import os
import platform
import time
from pathlib import Path
from zlib import crc32

import psutil
import torch

_CHOOSE_KERNELS = ("MKL_CBWR", "MKL_ENABLE", "MKL_DEBUG", "ONEDNN_", "DNNL_", "OPENBLAS_CORETYPE")
"""Of torch's libraries; torch's own choice is its capability."""

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


def free_memory() -> int:
    """Bytes that this machine can allocate without swapping."""
    available: int = psutil.virtual_memory().available
    return available


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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == field), "")


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
