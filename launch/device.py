"""Which device a rank computes on."""

import importlib.util
import os

import torch

from pipeline.config import DeviceName


def choose_device(name: DeviceName) -> torch.device:
    """Device of `pipeline.device`: ranks of a host share its GPUs in turn, by LOCAL_RANK.

    Raises:
        ValueError: CUDA is asked for and not there, or triton is missing.
    """
    if name == "cpu" or (name == "auto" and not gpu_count()):
        return torch.device("cpu")
    if not gpu_count():
        raise ValueError(
            'pipeline.device = "cuda": torch finds no GPU on this host; install a CUDA build of '
            'torch and a driver, or use "auto" or "cpu"'
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "pipeline.device: a GPU codes messages with triton, which is not installed; run pip "
            'install "triton>=3.6", or use pipeline.device = "cpu"'
        )
    return _own_gpu()


def gpu_count() -> int:
    """GPUs of this host that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_gpu_memory() -> int | None:
    """Bytes that this rank's GPU can still give out; None where there is none."""
    return torch.cuda.mem_get_info(_own_gpu())[0] if gpu_count() else None


def _own_gpu() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpu_count())
