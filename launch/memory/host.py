"""Whether a host has the memory for its ranks: model, activations, their cache, checkpoints."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from thinpipe.launch.config.caches import End, memory_folder
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host import disk
from thinpipe.launch.host.device import device_type, free_gpu_memory, gpu_count, host_notices
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.host.words import format_bytes
from thinpipe.launch.memory.exchange import ExchangeCost
from thinpipe.launch.memory.microbatches import in_flight
from thinpipe.launch.memory.model import BlockRun, ModelMemory, on_rank, rank_memory
from thinpipe.launch.memory.rows import HostBytes, check_memory, name_ranks, needs, plan_memory
from thinpipe.launch.memory.space import check_space, space_notices

_PROCESS_NBYTES = 120 * 2**20
"""Per rank, besides the rest: threads, buffers of links, imports that it changed."""
_LIBRARY_NBYTES = 45 * 2**20
"""What transformers takes of a rank, and bitsandbytes as much again; measured on a CPU."""
_KEPT = 4
"""Copies in RAM of a stage's state: its own, as much for another one, and a newer one of each."""
_REPORTING_NBYTES = 45 * 2**20  # bytes of the first rank for metrics, display and report
_GAPS, _GAPS_OF_LOSS, _GAPS_ON_GPU = 0.45, 1.2, 0.2
"""What an allocator cannot use again between tensors that come and go: of activations, and of the
few large tensors of a loss (`memory_count_cpu_202611.md` has measured both); of all on a GPU.
"""


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of RAM that some ranks need on one host.

    `copies` is what a save copies before it writes in the background, `kept` are copies of stages
    that stay in RAM; `parts` are the bytes that each rank saves. `unused` is what malloc keeps
    between tensors.
    """

    model: ModelMemory
    copies: int
    kept: int
    memories: HostBytes
    processes: int
    parts: tuple[int, ...]
    unused: int

    @property
    def total(self) -> int:
        held = self.model.total + self.copies + self.kept
        return held + self.unused + self.memories.ram + self.processes

    def compared(self, available: int) -> str:
        parts = {
            "weights": self.model.weights,
            "gradients": self.model.gradients,
            "optimizer": self.model.optimizer,
            "activations": self.model.activations + self.model.transient,
            "weights in bf16": self.model.casts,
            "weights of other shards": self.model.gathered,
            "cached weights": self.model.remembered,
            "the exchange of replicas": self.model.exchange + self.model.exchanged,
            "a copy while a checkpoint is written": self.copies,
            "copies of stages (checkpoint.ram_every)": self.kept,
            "the activation cache": self.memories.ram,
            "gaps between tensors": self.unused,
            "processes": self.processes,
        }
        listed = ", ".join(f"{format_bytes(n)} of {name}" for name, n in parts.items() if n)
        for layer in self.model.uncounted[:1]:
            listed += (
                f"; activations of layer {layer} are not counted: shapes do not determine them"
            )
        return f"RAM {format_bytes(self.total)} of {format_bytes(available)} free ({listed})"


def host_needs(
    config: RunConfig,
    sequences: int,
    ranks: Sequence[int],
    models: Sequence[ModelMemory] | None = None,
) -> HostNeeds:
    """RAM of these ranks, all on this host; stages on a GPU need its memory too (`gpu_nbytes`).

    `models` are the `rank_memory` of the config, which takes a while, if it is known.
    """
    positions = [config.mesh(rank).position for rank in ranks]
    models = models or rank_memory(config)
    held = [(position, models[position]) for position in positions]
    return _counted(config, _ends(config, sequences), held, reports=0 in ranks)


def device_nbytes(
    config: RunConfig, sequences: int, models: Sequence[ModelMemory] | None = None
) -> list[int]:
    """Bytes that each rank of a pipeline needs of its GPU or, on a CPU, of RAM."""
    models, ends = models or rank_memory(config), _ends(config, sequences)
    return [_on_device(config, ends, *one) for one in enumerate(models)]


def added_nbytes(
    config: RunConfig, sequences: int, blocks: Sequence[BlockRun], exchange: ExchangeCost | None
) -> tuple[list[list[int]], list[int]]:
    """Bytes that each block adds to each stage, and those that a stage takes without any."""
    heaviest = max(block.weights for block, _ in blocks)
    # that of the last block is for its loss, and no other stage's
    usual = max((block.transient for block, _ in blocks[:-1]), default=0)
    empty = ModelMemory(transient=usual)
    ends = _ends(config, sequences)

    def need(position: int, whole: ModelMemory) -> int:
        return _on_device(config, ends, position, on_rank(config, whole, heaviest, exchange))

    added, without, each = [], [], dict[ModelMemory, int]()
    for stage, held in enumerate(in_flight(config)):
        position = config.stage_ranks[stage]
        without.append(need(position, empty))
        for block in {block for block, _ in blocks}:
            own = replace(block, transient=max(0, block.transient - usual))
            each[block] = need(position, empty.plus(own, held=held)) - without[-1]
        added.append([each[block] for block, count in blocks for _ in range(count)])
    return added, without


def _ends(config: RunConfig, sequences: int) -> list[End]:
    return plan_memory(config, sequences) if sequences else []


def _on_device(config: RunConfig, ends: Sequence[End], position: int, model: ModelMemory) -> int:
    if device_type(config.pipeline.device) == "cpu":
        return _counted(config, ends, [(position, model)], reports=position == 0).total
    held = model.total - _offloaded(config, model).total
    # torch kept 5 to 13 % on an H100 (benchmarks/results/gpu_h100_202611.md)
    return held + int(_GAPS_ON_GPU * held)


def _offloaded(config: RunConfig, model: ModelMemory) -> ModelMemory:
    """What a rank with a GPU holds in RAM."""
    if not config.pipeline.offload:
        return ModelMemory()
    return ModelMemory(activations=model.activations, optimizer=model.optimizer)


def _counted(
    config: RunConfig,
    ends: Sequence[End],
    ranks: Sequence[tuple[int, ModelMemory]],
    *,
    reports: bool,
) -> HostNeeds:
    """RAM of ranks, by position in their pipelines; one of them may write the report."""
    positions, held = [position for position, _ in ranks], [model for _, model in ranks]
    on_cpu = device_type(config.pipeline.device) == "cpu"
    in_ram = held if on_cpu else [_offloaded(config, each) for each in held]
    model = functools.reduce(ModelMemory.plus, in_ram, ModelMemory())
    # what is on a GPU is saved through RAM
    copies = config.memory.tier != "disk" and (config.saves_in_training or not on_cpu)
    saved = [own.saved if copies else 0 for own in held]
    cached = [needs(config, ends, [position]).rows for position in positions]
    parts = tuple(own.saved + n for own, n in zip(held, cached, strict=True))
    libraries = config.model.libraries + (config.train.optimizer == "adamw8bit")
    each = _PROCESS_NBYTES + _LIBRARY_NBYTES * libraries
    processes = each * len(ranks) + _REPORTING_NBYTES * reports
    unused = sum(_unused(config, *one) for one in zip(in_ram, saved, strict=True))
    kept = 0 if config.checkpoint.ram_every is None else _KEPT * sum(own.saved for own in held)
    rows = needs(config, ends, positions)
    return HostNeeds(model, sum(saved), kept, rows, processes, parts, unused)


def _unused(config: RunConfig, model: ModelMemory, copies: int) -> int:
    """What malloc keeps between tensors; a save's copies take the place of freed activations.

    Ranks with shards return all that they free, those with quantized weights large tensors.
    """
    if config.pipeline.shards > 1:
        return 0
    counted = model.loss // 2  # without gradients, and in activations too
    between = max(0.0, _GAPS * max(0, model.activations - counted) - copies)
    return int(between + (0 if config.model.quantizes else _GAPS_OF_LOSS * model.loss))


def check_host(
    config: RunConfig,
    sequences: int,
    ranks: Sequence[int],
    models: Sequence[ModelMemory] | None = None,
) -> list[str]:
    """Check that this host has enough memory and disk for these ranks; what else to know of it.

    `models` as in `host_needs`.

    Raises:
        ConfigError, ValueError: naming what is too small or missing, and the remedy.
    """
    check_memory(config, sequences, ranks)
    found, here = host_needs(config, sequences, ranks, models), free_memory()
    if found.total > here:
        raise ConfigError(
            f"the {len(ranks)} ranks on this host do not fit: {found.compared(here)}; use more "
            "machines or stages, a smaller model, smaller microbatches (pipeline.microbatches), or "
            'memory.tier = "disk"'
        )
    places = {
        disk.existing(path).stat().st_dev for path in (memory_folder(config), config.run.path)
    }
    check_space(config.run.path, found.parts, found.memories.disk if len(places) == 1 else 0)
    return _notices(config, found)


def _notices(config: RunConfig, needed: HostNeeds) -> list[str]:
    own = host_notices(config.pipeline.device, config.pipeline.precision)
    if config.saves_in_training:
        own = [*space_notices(config.run.path, config.checkpoint.keep, needed.parts), *own]
    return own


def gpu_nbytes(
    config: RunConfig,
    sequences: int,
    ranks: Sequence[int],
    models: Sequence[ModelMemory] | None = None,
) -> int:
    """Bytes of the busiest GPU of a host with these ranks, without CUDA's own of each process."""
    return max(nbytes for _, nbytes in _by_gpu(config, sequences, ranks, models))


def _by_gpu(
    config: RunConfig, sequences: int, ranks: Sequence[int], models: Sequence[ModelMemory] | None
) -> list[tuple[Sequence[int], int]]:
    """The ranks that share each GPU of a host, as local ranks take turns, and its bytes."""
    each, per_rank = device_nbytes(config, sequences, models), config.pipeline.devices_per_rank
    gpus = max(1, gpu_count() // per_rank)
    shared = [ranks[gpu::gpus] for gpu in range(gpus)]
    return [
        (some, sum(each[config.mesh(rank).position] // per_rank for rank in some))
        for some in shared
    ]


def check_gpu(
    config: RunConfig,
    sequences: int,
    ranks: Sequence[int],
    models: Sequence[ModelMemory] | None = None,
    *,
    local_rank: int,
) -> None:
    """Check that the GPU of a rank holds all ranks that share it; that rank calls it.

    `models` as in `host_needs`.

    Raises:
        ConfigError: naming what they need, what is free, and the remedy.
    """
    if device_type(config.pipeline.device) == "cpu":
        return
    here = free_gpu_memory(config.pipeline.devices_per_rank)
    by_gpu = _by_gpu(config, sequences, ranks, models)
    sharing, needed = by_gpu[local_rank % len(by_gpu)]
    if here is not None and needed > here:
        raise ConfigError(
            f"{name_ranks(config, sharing)} on this host need {format_bytes(needed)} of a GPU, "
            f"and {format_bytes(here)} are free; use more GPUs or stages, smaller microbatches "
            '(pipeline.microbatches), pipeline.precision = "bf16", '
            "model.activation_checkpointing = true, or pipeline.offload = true"
        )


def show_host(console: Console, config: RunConfig, sequences: int, ranks: Sequence[int]) -> None:
    """Print what these ranks need if they run on this host."""
    models = rank_memory(config)
    found = host_needs(config, sequences, ranks, models)
    which, held = name_ranks(config, ranks), found.compared(free_memory())
    console.print(f"model, activations and activation cache of {which} together: {held}")
    folder = disk.existing(config.run.path)
    console.print(
        f"a checkpoint: {format_bytes(sum(found.parts))} on disk; {folder} has "
        f"{format_bytes(disk.free_nbytes(folder))} free"
    )
    for notice in _notices(config, found):
        console.print(notice, soft_wrap=True)
    if device_type(config.pipeline.device) == "cuda":
        most = gpu_nbytes(config, sequences, ranks, models)
        console.print(f"model, activations and what is cached on a GPU: up to {format_bytes(most)}")
        if not gpu_count():
            console.print("note: torch finds no GPU on this host; one is needed to train")
