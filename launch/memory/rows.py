"""How much memory AQ-SGD needs, computed before a run starts: bytes per cut, end and rank.

A rank's budget is divided so that each end of a cut on it holds equally many samples; the smaller
capacity of the two ends of a cut counts. In RAM, the rows that a step writes count too.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from thinpipe.launch.config.caches import (
    End,
    batch_of_rank,
    cache_ends,
    memory_folder,
    most_samples,
    sample_capacity,
)
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.device import device_type
from thinpipe.launch.host.disk import free_nbytes
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.host.words import format_bytes

_ROWS_IN_FLIGHT = 4
"""Per sample of a step with rows on disk: old, new, prefetched, and being written."""


@dataclass(frozen=True)
class HostBytes:
    """Bytes that the activation cache needs on one host.

    `ram` includes the copy of the `rows` that a checkpoint makes if they are in RAM.
    """

    rows: int
    ram: int
    disk: int


def plan_memory(config: RunConfig, sequences: int) -> list[End]:
    """Every memory of one DP rank (`pipeline/mesh.py`); DP ranks are alike."""
    samples, most = sequences // config.pipeline.dp_size, most_samples(config, sequences)
    ends = cache_ends(config)
    capacities = {end.position: sample_capacity(config, end.position) for end in ends}
    planned = []
    for end in ends:
        both = [capacities[other.position] for other in ends if other.cut == end.cut]
        room = min((capacity for capacity in both if capacity is not None), default=most)
        planned.append(replace(end, samples=samples, held=min(samples, room), most=min(most, room)))
    return planned


def needs(config: RunConfig, ends: Sequence[End], positions: Iterable[int]) -> HostBytes:
    """Bytes at most of the caches of ranks at these pipeline positions, all on one host.

    In RAM that is once as few replicas are left as may be, all of them here. On disk each replica
    sets aside what it may need.
    """
    counts, on_disk = Counter(positions), config.memory.tier == "disk"
    fewest = config.pipeline.replicas if on_disk else config.fewest_replicas
    here = [end for end in ends for _ in range(min(counts[end.position], fewest))]
    held = sum(end.nbytes for end in here)
    batch = batch_of_rank(config) * sum(end.row_nbytes for end in here)
    if on_disk:
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
    tier = config.memory.tier
    table = Table(title=f"activation cache by pipeline rank, tier {tier}", title_justify="left")
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
    if config.fewest_replicas < config.pipeline.replicas:
        least = config.elastic.min_replicas
        console.print(f"bytes include room for samples of lost replicas, down to {least} left")
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
