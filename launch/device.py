"""Which device a rank computes on."""

import os

import torch

from pipeline.config import DeviceName


def choose_device(name: DeviceName) -> torch.device:
    """Device of `pipeline.device`: ranks of a host share its GPUs in turn, by LOCAL_RANK.

    Raises:
        ValueError: CUDA is asked for and not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            'pipeline.device = "cuda": torch finds no GPU on this host; install a CUDA build of '
            'torch and a driver, or use "auto" or "cpu"'
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", index)
