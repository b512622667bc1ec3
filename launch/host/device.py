"""Which device a rank computes on."""

import importlib.util
import os
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch

from thinpipe.launch.host.packages import install
from thinpipe.launch.host.scratch import tmpdir_notice
from thinpipe.pipeline.precision import DeviceName, Precision


def choose_device(name: DeviceName) -> torch.device:
    """Device of `pipeline.device`: GPUs are assigned round-robin by LOCAL_RANK.

    Raises:
        ValueError: CUDA is requested but not available, or triton is missing.
    """
    if device_type(name) == "cpu":
        return torch.device("cpu")
    if not gpu_count():
        raise ValueError(
            'pipeline.device = "cuda": torch finds no GPU on this host; install a CUDA build of '
            'torch and a driver, or use "auto" or "cpu"'
        )
    if missing := _missing_for_triton():
        raise ValueError(
            f"pipeline.device: messages are encoded on a GPU with triton, which needs {missing}; "
            'or use pipeline.device = "cpu"'
        )
    return _own_gpu()


def device_type(name: DeviceName) -> str:
    """Type of the device of `pipeline.device`, whether or not this host has it."""
    return "cuda" if name == "cuda" or (name == "auto" and gpu_count()) else "cpu"


def choose_devices(name: DeviceName, per_rank: int) -> list[torch.device]:
    """Devices of a rank: with several, no two ranks of a host share a GPU."""
    if per_rank == 1 or choose_device(name).type == "cpu":
        return [choose_device(name)] * per_rank
    first = per_rank * local_rank()
    return [torch.device("cuda", first + index) for index in range(per_rank)]


def host_notices(name: DeviceName, precision: Precision) -> list[str]:
    """What to know of this host, where it is not as its variables say, keeps nothing or is slow."""
    found = (_hidden_gpus(name), tmpdir_notice(), cache_notice(name), _slow_bf16(name, precision))
    return [notice for notice in found if notice]


def _slow_bf16(name: DeviceName, precision: Precision) -> str | None:
    """Without AVX-512 an EPYC multiplied at 1 to 2 GFLOP/s in bf16, and at 42 to 67 in fp32."""
    if precision != "bf16" or device_type(name) != "cpu" or multiplies_bf16():
        return None
    return (
        'note: pipeline.precision = "bf16": this processor has no instructions for it, and may '
        'multiply many times slower than in fp32; use "fp32" unless memory is short'
    )


def multiplies_bf16() -> bool:
    """Whether this processor has what torch's library needs to multiply bf16 at speed."""
    built_in = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built_in and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _hidden_gpus(name: DeviceName) -> str | None:
    """CUDA_VISIBLE_DEVICES names none that there is; empty and negative, it is meant to."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if name == "cpu" or gpu_count() or not shown.strip() or shown.strip().startswith("-"):
        return None
    return (
        f"note: CUDA_VISIBLE_DEVICES = {shown}, and torch finds no such GPU on this host; correct "
        'the variable, or set pipeline.device = "cpu"'
    )


def cache_notice(name: DeviceName) -> str | None:
    """A notice where the kernels' machine code cannot be kept on disk."""
    if device_type(name) != "cpu":
        return None
    from thinpipe.pipeline.wire.kernels.cpu.kept import why_nothing_is_kept

    why = why_nothing_is_kept()
    return why and (
        f"note: compiled kernels cannot be kept ({why}): every start compiles them again, which "
        "takes 20 s or more; set NUMBA_CACHE_DIR to a writable folder"
    )


def check_gpus(name: DeviceName, per_rank: int, ranks_here: int) -> None:
    """ValueError if this host has too few GPUs, or `choose_device` rejects the setting."""
    needed = per_rank * ranks_here
    if per_rank > 1 and choose_device(name).type == "cuda" and needed > gpu_count():
        raise ValueError(
            f"pipeline.devices_per_rank = {per_rank}: {ranks_here} ranks on this host need "
            f"{needed} GPUs and it has {gpu_count()}; use fewer devices per rank, or start fewer "
            "ranks here"
        )


def make_repeatable(device: torch.device, *, deterministic: bool) -> None:
    """Make torch deterministic on a GPU, as a bit-exact resume requires; a CPU is without this.

    Call it before the device is used. Operations without a deterministic version then fail: if
    they only warned, torch would use the faster backward of attention, which is not repeatable.
    """
    if device.type != "cuda":
        return
    # torch's thread of the backward pass starts without a context, makes one, and warns of it
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _missing_for_triton() -> str | None:
    """Missing requirement of triton's compiler on this host; None if there is none.

    Looks for the compiler and the headers in the same places as `triton/runtime/build.py`.
    """
    if importlib.util.find_spec("triton") is None:
        return f"its package; run {install('triton>=3.6')}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler; install gcc or clang, or set CC"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return f"{headers / 'Python.h'}; install Python's headers (python3-dev)"
    return None


def gpu_count() -> int:
    """GPUs of this host that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_gpu_memory(per_rank: int = 1) -> int | None:
    """Free bytes of this rank's first GPU; None on a host without GPUs."""
    return torch.cuda.mem_get_info(_own_gpu(per_rank))[0] if gpu_count() else None


def _own_gpu(per_rank: int = 1) -> torch.device:
    return torch.device("cuda", per_rank * local_rank() % gpu_count())


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))
