"""How much memory AQ-SGD needs, computed before a run starts: bytes per cut, end and rank.

A rank's budget is divided so that each end of a cut on it holds equally many samples; the smaller
capacity of the two ends of a cut counts. In RAM, the rows that a step writes count too.
"""

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.device import device_type, free_gpu_memory, gpu_count
from thinpipe.launch.host.disk import existing
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.host.words import format_bytes
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction

_ROWS_IN_FLIGHT = 4
"""Per sample of a step with rows on disk: old, new, prefetched, and being written."""


@dataclass(frozen=True)
class End:
    """The memory at one end of a direction of a cut.

    It holds `held` of the `samples` that a replica visits.
    """

    cut: int
    direction: Direction
    side: Literal["sender", "receiver"]
    position: int
    row_nbytes: int
    samples: int
    held: int

    @property
    def nbytes(self) -> int:
        return self.held * self.row_nbytes


@dataclass(frozen=True)
class HostBytes:
    """Bytes that the activation cache needs on one host.

    `ram` includes the copy of the `rows` that a checkpoint makes if they are in RAM or on a GPU.
    `device` is for the GPU that needs most.
    """

    rows: int
    ram: int
    disk: int
    device: int


@dataclass(frozen=True)
class Free:
    """Bytes that a host has free for them; None for a GPU that it lacks."""

    ram: int
    disk: int
    device: int | None


def row_nbytes(config: RunConfig, spec: Spec) -> int:
    """Bytes per sample at one end of a direction; 0 for boundaries without a memory."""
    return spec.row_nbytes(*config.message_shape)


def sample_capacity(config: RunConfig, position: int) -> int | None:
    """Samples that the budget of a rank holds at each of its ends; None without a budget.

    Raises:
        ConfigError: it is too small for a single sample.
    """
    budget = config.memory.budget
    per_sample = _per_sample(config, position)
    if budget is None or not per_sample:
        return None
    in_progress = 0 if config.memory.tier == "disk" else _batch(config)
    samples = budget // per_sample - in_progress
    if samples < 1:
        most = max(_per_sample(config, end.position) for end in _ends(config))
        raise ConfigError(
            f"memory.budget = {format_bytes(budget)}: a sample takes {format_bytes(per_sample)} on "
            f"pipeline rank {position}, and {in_progress} more are written during a step; use "
            f"{_rounded_up((in_progress + 1) * most)} or more, the boundaries' memory at 8 or 4 "
            "bits, or another kind of boundary"
        )
    return samples


def plan_memory(config: RunConfig, sequences: int) -> list[End]:
    """Every memory of one DP rank (`pipeline/mesh.py`); DP ranks are alike.

    Raises:
        ConfigError: the budget is too small for a single sample.
    """
    samples = sequences // config.pipeline.dp_size
    ends = _ends(config)
    capacities = {end.position: sample_capacity(config, end.position) for end in ends}
    planned = []
    for end in ends:
        both = [capacities[other.position] for other in ends if other.cut == end.cut]
        held = min([samples, *(capacity for capacity in both if capacity is not None)])
        planned.append(replace(end, samples=samples, held=held))
    return planned


def needs(config: RunConfig, ends: Iterable[End], positions: Iterable[int]) -> HostBytes:
    """Bytes of the caches of ranks at these pipeline positions, all on one host."""
    rows, written = [], []
    for position in positions:
        here = [end for end in ends if end.position == position]
        rows.append(sum(end.nbytes for end in here))
        written.append(_batch(config) * sum(end.row_nbytes for end in here))
    held, batch = sum(rows), sum(written)
    tier = config.memory.tier
    ram = {"disk": _ROWS_IN_FLIGHT * batch, "device": held}.get(tier, 2 * held + batch)
    at_once = [sum(both) for both in zip(rows, written, strict=True)]
    return HostBytes(
        rows=held,
        ram=ram,
        disk=held if tier == "disk" else 0,
        device=busiest(at_once, config.pipeline.devices_per_rank) if tier == "device" else 0,
    )


def free(config: RunConfig) -> Free:
    """Free bytes of this host."""
    on_gpu = config.memory.tier == "device"
    return Free(
        ram=free_memory(),
        disk=shutil.disk_usage(existing(memory_folder(config))).free,
        device=free_gpu_memory(config.pipeline.devices_per_rank) if on_gpu else None,
    )


def _why_no_gpu(config: RunConfig) -> str:
    chosen = config.pipeline.device == "cpu"
    return 'pipeline.device = "cpu"' if chosen else "torch finds none on this host"


def _check_device(config: RunConfig) -> None:
    on_cpu = device_type(config.pipeline.device) == "cpu"
    if config.memory.tier in ("device", "pinned") and on_cpu:
        raise ConfigError(
            f'memory.tier = "{config.memory.tier}" is for stages on a GPU, but '
            f'{_why_no_gpu(config)}; use "ram" or "disk"'
        )
    if config.pipeline.offload and on_cpu:
        raise ConfigError(
            f"pipeline.offload = true is for stages on a GPU, but {_why_no_gpu(config)}; remove it"
        )


def check_memory(config: RunConfig, sequences: int, ranks: Iterable[int]) -> None:
    """Check that this host has enough memory and disk for these ranks.

    Raises:
        ConfigError, ValueError: naming what is too small or missing, and the remedy.
    """
    _check_device(config)
    positions = [config.mesh(rank).position for rank in ranks]
    found, here = needs(config, plan_memory(config, sequences), positions), free(config)
    if here.device is not None and found.device > here.device:
        raise ConfigError(
            f"the activation cache takes {format_bytes(found.device)} of a GPU's memory, but "
            f'{format_bytes(here.device)} are free; use memory.tier = "pinned" or "disk", '
            "set memory.budget to less, or the boundaries' memory to 8 or 4"
        )
    if found.disk > here.disk:
        raise ConfigError(
            f"the activation cache takes {format_bytes(found.disk)} on disk, but "
            f"{memory_folder(config)} has {format_bytes(here.disk)} free; set memory.folder to a "
            "larger disk, memory.budget to less, or the boundaries' memory to 8 or 4"
        )
    if found.ram > here.ram:
        raise ConfigError(
            f"the activation cache takes {format_bytes(found.ram)} of RAM on this host, a copy for "
            f"checkpoints included, but {format_bytes(here.ram)} are free; use memory.tier = "
            '"disk", set memory.budget to less, or the boundaries\' memory to 8 or 4'
        )


def memory_notices(ends: Iterable[End]) -> list[str]:
    """Notices about budgets that do not hold all samples."""
    return [
        f"note: cut {end.cut} {end.direction} caches {end.held:,} of {end.samples:,} samples, "
        "as memory.budget "
        "allows; the others are sent as in a first epoch every time"
        for end in ends
        if end.side == "sender" and end.held < end.samples
    ]


def show_memory(
    console: Console, config: RunConfig, ends: list[End], shares: Sequence[Sequence[int]]
) -> None:
    """Print the plan, and what this host has free if one of the shares of its ranks is on it."""
    if config.pipeline.auto_cuts:
        console.print(
            f'pipeline.cuts = "auto": the {config.pipeline.stages - 1} cuts are chosen when the '
            "run starts, or by `thinpipe plan`; all need the same memory"
        )
    if not ends:
        console.print("no activation cache: no boundary uses AQ-SGD")
        return
    title = f"activation cache by pipeline rank, tier {config.memory.tier}"
    table = Table(title=title, title_justify="left")
    for name in ("cut", "direction", "end", "rank", "per sample", "held", "bytes"):
        table.add_column(name, justify="left" if name in ("direction", "end") else "right")
    for end in ends:
        table.add_row(
            "auto" if config.pipeline.auto_cuts else str(end.cut),
            end.direction,
            end.side,
            str(end.position),
            format_bytes(end.row_nbytes),
            f"{end.held:,} of {end.samples:,}",
            format_bytes(end.nbytes),
        )
    console.print(table)
    for ranks in shares:
        which = name_ranks(config, ranks)
        console.print(f"with {which} on this host:", *_totals(config, ends, ranks))


def name_ranks(config: RunConfig, ranks: Sequence[int]) -> str:
    """Some ranks of a run, in words."""
    if len(ranks) == config.world_size:
        return f"all {len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _totals(config: RunConfig, ends: list[End], ranks: Sequence[int]) -> Iterator[str]:
    positions = [config.mesh(rank).position for rank in ranks]
    found, here = needs(config, ends, positions), free(config)
    if config.memory.tier == "disk":
        yield f"disk {format_bytes(found.disk)} of {format_bytes(here.disk)} free;"
        parts = "rows being read and written"
    elif config.memory.tier == "device":
        gpu = "unknown" if here.device is None else format_bytes(here.device)
        yield f"GPU {format_bytes(found.device)} of {gpu} free;"
        parts = "a copy of the rows while a checkpoint is saved"
    else:
        rows, written = format_bytes(found.rows), format_bytes(found.ram - 2 * found.rows)
        parts = f"{rows} of rows, {rows} for a copy while a checkpoint is saved, {written} of "
        parts += "rows written during a step"
    yield f"RAM {format_bytes(found.ram)} of {format_bytes(here.ram)} free ({parts})"


def memory_folder(config: RunConfig) -> Path:
    """Folder for the files of the disk tier."""
    folder = config.memory.folder
    return config.run.path if folder is None else Path(folder).expanduser().resolve()


def _ends(config: RunConfig) -> list[End]:
    """Every memory, still empty, of the cuts between two ranks."""
    ranks, found = config.stage_ranks, []
    for stage, cut in enumerate(config.pipeline.cuts):
        upper, lower = ranks[stage], ranks[stage + 1]
        for direction in DIRECTIONS:
            row = row_nbytes(config, config.specs[cut, direction])
            if not row or upper == lower:
                continue
            source, target = (upper, lower) if direction == "forward" else (lower, upper)
            found.append(End(cut, direction, "sender", source, row, samples=0, held=0))
            found.append(End(cut, direction, "receiver", target, row, samples=0, held=0))
    return found


def _per_sample(config: RunConfig, position: int) -> int:
    """Bytes of one sample in all caches of a pipeline rank."""
    return sum(end.row_nbytes for end in _ends(config) if end.position == position)


def _rounded_up(nbytes: int) -> str:
    """Rounded up to three digits, as a size that a run file can contain."""
    step = max(1, 10 ** (len(str(nbytes)) - 3))
    return format_bytes(math.ceil(nbytes / step) * step)


def _batch(config: RunConfig) -> int:
    return config.train.batch_size // config.pipeline.dp_size


def busiest(nbytes: Sequence[int], per_rank: int) -> int:
    """Bytes on the busiest GPU: local ranks are assigned to GPUs round-robin."""
    gpus = max(1, gpu_count() // per_rank)
    return max((sum(nbytes[gpu::gpus]) for gpu in range(gpus)), default=0)
