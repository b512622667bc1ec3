"""What `plan --place` needs to know of a host's devices: how many, how fast, how much memory."""

from collections.abc import Sequence
from typing import Any

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.device import free_gpu_memory, gpu_count
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.plan.profile import typical_block_s

_DIGITS = 3


def own_devices(config: RunConfig) -> dict[str, float]:
    """This host's: their number, bytes that are free on each, seconds of a block of the model."""
    gpus = gpu_count() if config.pipeline.device != "cpu" else 0
    free = (free_gpu_memory() or 0) if gpus else free_memory()
    return {"devices": max(1, gpus), "memory": free, "block_s": typical_block_s(config)}


def as_hosts(names: Sequence[str], devices: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """`hosts` of a network file; speeds are relative to the first host's."""
    return [
        {
            "name": name,
            "devices": int(own["devices"]),
            "speed": round(devices[0]["block_s"] / own["block_s"], _DIGITS),
            "memory_gb": round(own["memory"] / 1e9, _DIGITS),
        }
        for name, own in zip(names, devices, strict=True)
    ]
