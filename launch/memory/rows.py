"""How much memory AQ-SGD needs, computed before a run starts: bytes per cut, end and rank.

A rank's budget is divided so that each end of a cut on it holds equally many samples; the smaller
capacity of the two ends of a cut counts. In RAM, the rows that a step writes count too.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.device import device_type, gpu_count
from thinpipe.launch.host.disk import free_nbytes
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.host.words import format_bytes
from thinpipe.pipeline.models.paths import user_path
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

    `ram` includes the copy of the `rows` that a checkpoint makes if they are in RAM.
    """

    rows: int
    ram: int
    disk: int


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
    """Every memory of one DP rank (`pipeline/mesh.py`); DP ranks are alike."""
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
    ends = list(ends)
    here = [end for position in positions for end in ends if end.position == position]
    held = sum(end.nbytes for end in here)
    batch = _batch(config) * sum(end.row_nbytes for end in here)
    if config.memory.tier == "disk":
        return HostBytes(rows=held, ram=_ROWS_IN_FLIGHT * batch, disk=held)
    return HostBytes(rows=held, ram=2 * held + batch, disk=0)


def check_memory(config: RunConfig, sequences: int, ranks: Iterable[int]) -> None:
    """Check that this host has enough memory and disk for these ranks.

    Raises:
        ConfigError, ValueError: naming what is too small or missing, and the remedy.
    """
    if config.pipeline.offload and device_type(config.pipeline.device) == "cpu":
        chosen = config.pipeline.device == "cpu"
        why = 'pipeline.device = "cpu"' if chosen else "torch finds none on this host"
        raise ConfigError(f"pipeline.offload = true is for stages on a GPU, but {why}; remove it")
    positions = [config.mesh(rank).position for rank in ranks]
    found = needs(config, plan_memory(config, sequences), positions)
    room, ram = free_nbytes(memory_folder(config)), free_memory()
    if found.disk > room:
        raise ConfigError(
            f"the activation cache takes {format_bytes(found.disk)} on disk, but "
            f"{memory_folder(config)} has {format_bytes(room)} free; set memory.folder to a "
            "larger disk, memory.budget to less, or the boundaries' memory to 8 or 4"
        )
    if found.ram > ram:
        raise ConfigError(
            f"the activation cache takes {format_bytes(found.ram)} of RAM on this host, a copy for "
            f"checkpoints included, but {format_bytes(ram)} are free; use memory.tier = "
            '"disk", set memory.budget to less, or the boundaries\' memory to 8 or 4'
        )


def memory_notices(ends: Iterable[End]) -> list[str]:
    """Notices about budgets that do not hold all samples."""
    return [
        f"note: cut {end.cut} {end.direction} caches {end.held:,} of {end.samples:,} samples, "
        "as memory.budget allows; the others are sent as in a first epoch every time"
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
    found = needs(config, ends, positions)
    if config.memory.tier == "disk":
        room = free_nbytes(memory_folder(config))
        yield f"disk {format_bytes(found.disk)} of {format_bytes(room)} free;"
        parts = "rows being read and written"
    else:
        rows, written = format_bytes(found.rows), format_bytes(found.ram - 2 * found.rows)
        parts = f"{rows} of rows, {rows} for a copy while a checkpoint is saved, {written} of "
        parts += "rows written during a step"
    yield f"RAM {format_bytes(found.ram)} of {format_bytes(free_memory())} free ({parts})"


def memory_folder(config: RunConfig) -> Path:
    """Folder for the files of the disk tier."""
    folder = config.memory.folder
    return config.run.path if folder is None else user_path(folder).resolve()


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
