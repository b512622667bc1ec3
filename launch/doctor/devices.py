"""A host's devices, for `plan --place`: how many, how fast, how much memory."""

from collections.abc import Sequence
from typing import Any

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.profile import typical_block_s
from thinpipe.launch.doctor.result import CheckResult, warning
from thinpipe.launch.host.device import free_gpu_memory, gpu_count
from thinpipe.launch.host.network import Host
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.resources import free_memory

_DIGITS, _LEAST = 3, 1e-3


MEASURING_S = 300.0
"""How long other hosts may take to measure theirs."""


def own_devices(config: RunConfig) -> dict[str, Any]:
    """This host's: their number, bytes that are free on each, seconds of a block of the model; or
    why it could not be timed.
    """
    gpus = gpu_count() if config.pipeline.device != "cpu" else 0
    free = (free_gpu_memory() or 0) if gpus else free_memory()
    found: dict[str, Any] = {"devices": max(1, gpus), "memory": free}
    try:
        return found | {"block_s": typical_block_s(config)}
    except (RuntimeError, MemoryError, ValueError, OSError, ImportError) as error:
        reason = explain(error) or type(error).__name__
        return found | {"failed": reason.splitlines()[0]}


def untimed(names: Sequence[str], devices: Sequence[dict[str, Any]]) -> list[CheckResult]:
    """A warning for each host whose speed is not known."""
    remedy = "add its speed to `hosts` of the file, or run doctor on it again"
    return [
        warning(name, f"a block of the model could not be timed ({own['failed']})", remedy)
        for name, own in zip(names, devices, strict=False)  # none where nobody saves
        if "failed" in own
    ]


def as_hosts(names: Sequence[str], devices: Sequence[dict[str, Any]]) -> tuple[Host, ...]:
    """`hosts` of a network file; speeds are relative to the first host that has one."""
    first_s = next((own["block_s"] for own in devices if "block_s" in own), None)
    return tuple(
        Host(
            name=name,
            devices=own["devices"],
            memory_gb=max(_LEAST, round(own["memory"] / 1e9, _DIGITS)),
            **(
                {"speed": max(_LEAST, round(first_s / own["block_s"], _DIGITS))}
                if "block_s" in own
                else {}
            ),
        )
        for name, own in zip(names, devices, strict=True)
    )
