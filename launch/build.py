"""RunConfig -> the stages, channels, optimizer and exchange of one rank: joins the engines."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinpipe.aqsgd.store import RamStore, Store
from thinpipe.gradcomp.registry import build_optimizer, load_method
from thinpipe.launch.best import Best
from thinpipe.launch.components import Built
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.caches import memory_folder, row_nbytes, sample_capacity
from thinpipe.launch.config.model import shares_casts
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host import disk
from thinpipe.launch.host.allocator import return_freed_memory
from thinpipe.launch.host.device import choose_devices, make_repeatable
from thinpipe.launch.optimizer import (
    Named,
    OptimizerFactory,
    Rates,
    check_single,
    make_optimizer,
    named_parameters,
)
from thinpipe.pipeline.comm.channel import IncomingChannel, OutgoingChannel
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.comm.tied import TiedWeight
from thinpipe.pipeline.comm.transport import FIRST_CUT, Link, Transport
from thinpipe.pipeline.engine import EngineOptions, PipelineEngine
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.stage import Channels, Stage
from thinpipe.pipeline.wire.told import BACKWARD, DIRECTIONS, FORWARD

if TYPE_CHECKING:
    from thinpipe.gradcomp.sharded.stage import StageShards
    from thinpipe.pipeline.models.build import StageModule
    from thinpipe.pipeline.models.torchgpipe_stage import LocalPipeline

_CUSTOM_OPTIMIZER = (
    "pipeline.shards = {}: a custom optimizer would get only some rows of every parameter; "
    'use train.optimizer = "adamw"'
)

LinkMaker = Callable[[int, int], Link | None]
"""(upper stage, direction) -> this process's end; None where none is needed."""


@dataclass(frozen=True)
class Wiring:
    """Which stages this process holds, what joins them to others, and what runs them.

    `make_schedule` has the signature of `pipeline.schedule.build_schedule`, which is the default.
    """

    stages: Sequence[int]
    make_link: LinkMaker
    make_schedule: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ProgramParts:
    """Objects of a program that a run file only names.

    `optimizer` makes the optimizer of a rank's parameters; `schedule` is what its learning rates
    are multiplied by in a step (from 0), or torch `schedulers` set them; `metrics` are functions or
    `pipeline.metrics.Metric`s. Ranks of a program may make unlike calls, those of run files cannot.
    """

    optimizer: OptimizerFactory | None = None
    schedule: Callable[[int], float] | None = None
    schedulers: Sequence[LRScheduler] = ()
    metrics: Sequence[object] = ()
    is_program: bool = False


def build(
    config: RunConfig,
    transport: Transport,
    *,
    run_id: int,
    total_steps: int,
    pace: Callable[[int], float] = float,
    wiring: Wiring | None = None,
    given: ProgramParts | None = None,
) -> Built:
    """Make this rank's part of the run; every rank calls it alike.

    A step's learning rate is that of step `pace(step)` of `total_steps`. Without a `wiring` the
    schedule says which rank holds which stage, and the transport joins them.
    """
    assert not config.pipeline.auto_cuts, "cuts are decided"
    wiring, given = wiring or _rank_wiring(config, transport), given or ProgramParts()
    if config.pipeline.shards > 1 and given.optimizer is not None:
        raise ValueError(_CUSTOM_OPTIMIZER.format(config.pipeline.shards))
    devices = _devices(config)
    device = devices[0]
    make_repeatable(device, deterministic=config.pipeline.deterministic)
    modules = {stage: build_stage(config, stage, devices) for stage in wiring.stages}
    shared = _tie(config, modules)
    held, shards = _shard(config, modules, transport, devices)
    if shared is not None and shards is not None:
        (shared,) = (part for stage in shards.stages if (part := stage.tied_weight()) is not None)
    kind = _stage_kind(config)
    stages = [
        kind(
            held[stage],
            stage,
            config.pipeline.stages,
            channels=_channels(config, wiring, stage, run_id=run_id),
            group=transport.pipeline_group,
            device=device,
        )
        for stage in wiring.stages
    ]
    parameters = named_parameters(list(held.values()))
    exchanged = list(parameters.values())
    if shards is not None:
        exchanged = [own for stage in shards.stages for own in stage.in_forward_order()]
    method = load_method(config.method)
    sync = method.build(config.method_options, exchanged, transport.peers("copies"))
    optimizer = _optimizer(config, parameters, sync, given.optimizer)
    engine = PipelineEngine(
        stages,
        transport,
        engine_options(config),
        optimizer=optimizer,
        sync=sync,
        tied=None if shared is None else TiedWeight(shared, transport),
        shards=shards,
        make_schedule=wiring.make_schedule,
    )
    factor = given.schedule or _lr_factor(config, total_steps, pace)
    rates = Rates(optimizer, factor, given.schedulers)
    return Built(stages, engine, optimizer, rates, sync, Best(config.eval), shards)


def build_stage(
    config: RunConfig, stage: int, devices: Sequence[torch.device]
) -> "StageModule | LocalPipeline":
    """The module of a stage, spread over the devices if there are several."""
    bounds = (0, *config.pipeline.cuts, config.model.layers)

    def part(first: int, stop: int, device: torch.device) -> "StageModule":
        return config.model.build(first, stop, seed=config.run.seed, device=device)

    if config.model.quantizes:
        return_freed_memory()  # values read from codes come and go in each product
    first, stop = bounds[stage], bounds[stage + 1]
    if len(devices) == 1:
        return part(first, stop, devices[0])
    from thinpipe.pipeline.models.torchgpipe_stage import LocalPipeline  # imports torchgpipe

    return LocalPipeline(part, first, stop, devices=devices)


def _stage_kind(config: RunConfig) -> type[Stage]:
    if not config.pipeline.cuts:
        return Stage
    from thinpipe.pipeline.schedule import CompressedStage  # imports torch's pipelining

    return CompressedStage


def engine_options(config: RunConfig) -> EngineOptions:
    """How the engine runs a step of this config."""
    sends = bool(config.pipeline.cuts)  # without, an own model need not be tried for its shapes
    tokens, width = config.message_shape if sends else (0, 0)
    remembers = any(spec.remembers for spec in config.specs.values())
    return EngineOptions(
        schedule=config.pipeline.schedule,
        microbatches=config.pipeline.microbatches,
        cuts=config.pipeline.cuts,
        hidden=width,
        tokens=config.model.tokens_of if sends else lambda _: 0,
        longest=tokens if config.data.factory and remembers else None,
        with_inputs=config.model.with_inputs,
        depth=config.pipeline.depth,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        precision=config.pipeline.precision,
        share_casts=shares_casts(config.pipeline, config.model),
        offload=config.pipeline.offload,
        objective=config.model.objective(),
        guarded={
            (cut, DIRECTIONS.index(way)): spec.remedy()
            for (cut, way), spec in config.specs.items()
            if spec.kind != "raw" and config.boundary_at(cut).guard.mode != "off"
        },
    )


def _devices(config: RunConfig) -> list[torch.device]:
    return choose_devices(config.pipeline.device, config.pipeline.devices_per_rank)


def _tie(
    config: RunConfig, modules: "Mapping[int, StageModule | LocalPipeline]"
) -> nn.Parameter | None:
    """Share the tied weight between stages of this rank, or return the copy to keep equal."""
    first, last = modules.get(0), modules.get(config.pipeline.stages - 1)
    ends = [stage for stage in (first, last) if stage is not None]
    weights = [stage.tied_weight() for stage in ends]
    if len(ends) == 2 and weights[0] is not None:
        one_device = cast("StageModule", ends[1])  # tied weights on several: rejected by the config
        one_device.share_tied_weight(weights[0])
        return None
    trained = [weight for weight in weights if weight is not None and weight.requires_grad]
    return trained[0] if trained else None  # what LoRA freezes stays equal by itself


def _shard(
    config: RunConfig,
    modules: "Mapping[int, StageModule | LocalPipeline]",
    transport: Transport,
    devices: Sequence[torch.device],
) -> "tuple[Mapping[int, nn.Module], StageShards | None]":
    """This rank's shards of its stages, or the stages as they are."""
    if config.pipeline.shards == 1:
        return modules, None
    if devices[0].type != "cpu":
        raise ConfigError(
            f"pipeline.shards = {config.pipeline.shards}: sharded stages run on CPUs only; "
            'set pipeline.device = "cpu"'
        )
    from thinpipe.gradcomp.sharded.stage import ShardedStage, StageShards  # with FSDP2

    return_freed_memory()
    group = transport.shard_group
    whole = cast("Mapping[int, Any]", modules)  # others than whole layers: rejected by the config
    held = {stage: ShardedStage(part, part.parts(), group) for stage, part in whole.items()}
    what = f"stage {'+'.join(map(str, held))} shard"
    peers = transport.peers("shards", what)
    seed = config.run.seed | (1 << 16 | transport.mesh.rank) << 32  # those of cuts are below
    return held, StageShards(list(held.values()), peers, config.shards, seed=seed)


def _rank_wiring(config: RunConfig, transport: Transport) -> Wiring:
    ranks = config.stage_ranks
    own = [stage for stage, rank in ranks.items() if rank == transport.mesh.position]

    def make_link(upper: int, direction: int) -> Link | None:
        """Link to another rank; None when both stages are here."""
        if ranks[upper] == ranks[upper + 1]:
            return None
        mesh, cut = transport.mesh, config.pipeline.cuts[upper]
        ends = [(stage, mesh.rank_at(ranks[stage])) for stage in (upper, upper + 1)]
        (peer,) = (rank for _, rank in ends if rank != mesh.rank)
        source, target = ends if direction == FORWARD else ends[::-1]
        name = (
            f"stage {source[0]} (rank {source[1]}) -> stage {target[0]} (rank {target[1]}), "
            f"cut {cut} {DIRECTIONS[direction]}"
        )
        device = _devices(config)[0]
        return transport.link(peer, FIRST_CUT + 2 * upper + direction, name, device=device)

    return Wiring(own, make_link)


_End = TypeVar("_End", OutgoingChannel, IncomingChannel)


def _channels(config: RunConfig, wiring: Wiring, stage: int, *, run_id: int) -> Channels:
    def make(end: type[_End], upper: int, direction: int) -> _End | None:
        """An end of the cut between stages `upper` and `upper + 1`; None without a link there."""
        if upper < 0 or upper + 1 >= config.pipeline.stages:
            return None
        link = wiring.make_link(upper, direction)
        return None if link is None else end(codec(upper, direction), link)

    def codec(upper: int, direction: int) -> MessageCodec:
        cut, device = config.pipeline.cuts[upper], _devices(config)[0]
        spec = config.specs[cut, DIRECTIONS[direction]]
        return MessageCodec(
            cut=cut,
            direction=direction,
            boundaries=spec.build(
                width=config.message_shape[1],
                key=config.run.seed | (2 * cut + direction) << 32,
                store=_store(config, spec) if row_nbytes(config, spec) else None,
                capacity=sample_capacity(config, config.stage_ranks[stage]),
            ),
            run_id=run_id,
            device=device,
        )

    sent, returned = make(OutgoingChannel, stage, FORWARD), make(IncomingChannel, stage, BACKWARD)
    if sent is not None and returned is not None:
        returned.codec.gradient_sink = sent.codec.training.take_gradients
    return Channels(
        activations_in=make(IncomingChannel, stage - 1, FORWARD),
        activations_out=sent,
        gradients_in=returned,
        gradients_out=make(OutgoingChannel, stage - 1, BACKWARD),
    )


def _store(config: RunConfig, spec: Spec) -> Store:
    if config.memory.tier != "disk":
        return RamStore()
    from thinpipe.aqsgd.disk import DiskStore, RowFile

    folder = memory_folder(config)
    try:
        return DiskStore(RowFile(folder, row_nbytes(config, spec)))
    except OSError as error:
        raise ConfigError(
            f"memory.folder = {folder}: no file can be made there: {disk.why(error, folder)}"
        ) from error


def _optimizer(
    config: RunConfig, parameters: Named, sync: ReplicaSync, own: OptimizerFactory | None
) -> torch.optim.Optimizer:
    """That of the exchange between replicas, if it brings one, or that of the settings."""
    train, method = config.train, config.method
    check_single(train.optimizer, method)
    brought = build_optimizer(method, config.method_options, list(parameters.values()), train, sync)
    in_bf16 = config.model.trains_in_bf16
    return brought or make_optimizer(train, parameters, in_bf16=in_bf16, own=own)


def _lr_factor(
    config: RunConfig, total_steps: int, pace: Callable[[int], float]
) -> Callable[[int], float] | None:
    """Factor of a step's learning rate; None leaves it alone."""
    train = config.train
    if not train.warmup_steps and train.decay == "none":
        return None

    def factor(number: int) -> float:
        step = pace(number)
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        if train.decay == "none":
            return 1.0
        rest = max(total_steps - train.warmup_steps, 1)
        done = min((step - train.warmup_steps) / rest, 1.0)
        return 1.0 - done if train.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return factor
