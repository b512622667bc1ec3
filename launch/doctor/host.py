"""Inspects one host: interface, kernel settings, memory and disk, versions, config, devices."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.profile import typical_block_s
from thinpipe.launch.host.device import device_type, free_gpu_memory, gpu_count
from thinpipe.launch.host.network import Host
from thinpipe.launch.host.packages import explain, versions
from thinpipe.launch.host.resources import free_memory, usable_cores
from thinpipe.launch.host.words import format_bytes
from thinpipe.launch.memory.host import gpu_nbytes, host_needs
from thinpipe.launch.memory.model import ModelMemory, rank_memory
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.preflight import Ready, Share, check_room

MEASURING_S = 300.0
"""How long other hosts may take to measure theirs."""
_SOON_DAYS = 14  # to copy a new key to all machines
_SYSCTL = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. A problem prevents a run, a warning may slow it down."""

    level: Literal["ok", "warning", "problem"]
    where: str
    text: str
    remedy: str = ""


ok, warning, problem = (partial(CheckResult, level) for level in ("ok", "warning", "problem"))


@dataclass(frozen=True)
class HostInfo:
    """One host, JSON-able. Sizes in bytes; `port` is where it listens while links are measured."""

    name: str
    address: str
    port: int
    send_buffer: int
    receive_buffer: int
    slow_start_after_idle: bool
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    results: Sequence[dict[str, Any]] = ()


def check_host(ready: Ready, shares: Sequence[Share]) -> list[CheckResult]:
    """Check this host, which will have one of these shares of the ranks, without the others."""
    config, sequences, name = ready.config, len(ready.corpus.train), ready.config.network.own_name()
    models = rank_memory(config)
    try:
        notices = check_room(ready, shares)
    except ValueError as error:
        room = [problem(name, str(error), "")]
    else:
        needs = [host_needs(config, sequences, share, models) for share in shares]
        least = min(needs, key=lambda found: found.total)
        room = [ok(name, least.compared(free_memory()))]
        room += [warning(name, note.removeprefix("note: "), "") for note in notices]
    return [*room, *_gpu(config, sequences, name, shares, models), _devices(name)]


def describe_host(
    config: RunConfig, address: str, *, port: int, results: Sequence[CheckResult]
) -> HostInfo:
    """This host, for the others; it listens at `address`."""
    return HostInfo(
        name=config.network.own_name(),
        address=address,
        port=port,
        send_buffer=_largest("tcp_wmem"),
        receive_buffer=_largest("tcp_rmem"),
        slow_start_after_idle=_sysctl("tcp_slow_start_after_idle", "1") == "1",
        versions=versions(),
        config=config.shared(),
        results=[asdict(result) for result in results],
    )


def check_key(config: NetworkConfig) -> CheckResult:
    """Whether this host's key can be used, and for how long."""
    path, name = config.find_key(), config.own_name()
    info, now = keys.read(path), datetime.now(UTC)
    left = (info.not_after - now).days
    if now < info.not_before:
        text = f"{path}: valid from {info.not_before:%Y-%m-%d}, and here it is {now:%Y-%m-%d}"
        return problem(name, text, "timedatectl set-ntp true")
    if info.name not in (None, name):
        text = f"{path}: the key of {info.name!r}, and this machine is {name!r}"
        return problem(name, text, f"set network.name = {info.name!r}, or copy the right key")
    if left < 0:
        text = f"{path}: expired on {info.not_after:%Y-%m-%d}"
        return problem(name, text, "make a new one (thinpipe key new) and copy it to all machines")
    if left < _SOON_DAYS:
        return warning(name, f"{path}: expires in {left} days", "make a new one in time")
    return ok(name, f"key {path}, valid until {info.not_after:%Y-%m-%d}")


def _gpu(
    config: RunConfig,
    sequences: int,
    where: str,
    shares: Sequence[Share],
    models: Sequence[ModelMemory],
) -> list[CheckResult]:
    if device_type(config.pipeline.device) == "cpu":
        return []
    here = free_gpu_memory(config.pipeline.devices_per_rank)
    if here is None:
        return []
    most = max(gpu_nbytes(config, sequences, share, models) for share in shares)
    text = f"{format_bytes(most)} of a GPU's memory, of which {format_bytes(here)} are free"
    remedy = "use more GPUs or stages, smaller microbatches, or bf16"
    return [problem(where, text, remedy) if most > here else ok(where, text)]


def _devices(where: str) -> CheckResult:
    if not torch.cuda.is_available():
        return ok(where, f"{usable_cores()} processor cores, no GPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ok(where, f"{usable_cores()} processor cores, GPUs: {', '.join(names)}")


def _largest(name: str) -> int:
    return int(_sysctl(name, "0 0 0").split()[2])


def _sysctl(name: str, default: str) -> str:
    try:
        return (_SYSCTL / name).read_text(encoding="utf-8").strip()
    except OSError:
        return default


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


def _rounded(number: float) -> float:
    return max(1e-3, round(number, 3))  # rounded to 0 it would not be read back


def as_hosts(names: Sequence[str], devices: Sequence[dict[str, Any]]) -> tuple[Host, ...]:
    """`hosts` of a network file; speeds are relative to the first host that has one."""
    first_s = next((own["block_s"] for own in devices if "block_s" in own), None)
    return tuple(
        Host.model_validate(
            {"name": name, "devices": own["devices"], "memory_gb": _rounded(own["memory"] / 1e9)}
            | ({"speed": _rounded(first_s / own["block_s"])} if "block_s" in own else {})
        )
        for name, own in zip(names, devices, strict=True)
    )
