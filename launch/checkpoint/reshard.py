"""Resume under other cuts, another schedule or another number of replicas.

Parts are then read by parameter name: weights and optimizer state are exact. Memories are kept
where cut and samples stayed. State tied to a position (the cache of moved cuts, the replica
exchange's state, random numbers of dropout) is reset, and that is logged.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.base import Digests, check_present, saved_base
from thinpipe.launch.checkpoint.manifest import CheckpointError, size_error
from thinpipe.pipeline.comm.channel import Channel
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.orders import stage_to_rank
from thinpipe.pipeline.wire.told import DIRECTIONS

if TYPE_CHECKING:
    from thinpipe.launch.components import Built

_log = logging.getLogger(__name__)

OwnRows = Callable[[Tensor], Tensor]


class Layout(NamedTuple):
    """How layers and samples are distributed: `holders[i]` is the rank of stage i."""

    cuts: tuple[int, ...]
    holders: tuple[int, ...]
    replicas: int
    shards: int = 1

    @classmethod
    def of(cls, pipeline: Mapping[str, Any]) -> "Layout":
        config = PipelineConfig.model_validate(pipeline)
        ranks = stage_to_rank(config.schedule, stages=config.stages, ranks=config.pipeline_ranks)
        holders = tuple(ranks[stage] for stage in sorted(ranks))
        return cls(config.cuts, holders, config.replicas, config.shards)

    @property
    def dp_size(self) -> int:
        return self.replicas * self.shards

    def __str__(self) -> str:
        sharded = f", shards {self.shards}" if self.shards > 1 else ""
        return f"cuts {list(self.cuts)}, replicas {self.replicas}{sharded}"


@dataclass
class ReplicaState:
    """The state of one replica, by parameter name."""

    model: dict[str, Tensor]
    base: dict[str, str]
    optimizer: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    first_part: dict[str, Any]


def part_name(mesh: Mesh) -> str:
    """Name of the part of a rank."""
    name = f"replica-{mesh.replica}.rank-{mesh.position}"
    return name if mesh.shards == 1 else f"{name}.shard-{mesh.shard}"


def parts_of(folder: Path, *, replica: int) -> list[str]:
    """Names of a replica's parts in a checkpoint."""
    names = checkpoint.read_manifest(folder).names
    return [name for name in names if name.startswith(f"replica-{replica}.")]


def whole_replicas(names: Sequence[str], there: Collection[str]) -> list[str]:
    """The parts of those replicas of which all parts are there."""
    lacking = {name.partition(".")[0] for name in names if name not in there}
    return [name for name in names if name.partition(".")[0] not in lacking]


def channel_name(channel: Channel) -> str:
    """Name of a direction of a cut."""
    return f"cut-{channel.codec.cut}.{DIRECTIONS[channel.codec.direction]}"


def module_of(stage: Any) -> nn.Module:
    """The module of a stage."""
    module: nn.Module = stage.submod
    return module


def parameter_names(built: "Built") -> list[list[str]]:
    """All names of each parameter, in the order of the optimizer's state."""
    names: dict[int, list[str]] = {}
    for stage in built.stages:
        for name, parameter in module_of(stage).named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return [names[id(p)] for group in built.optimizer.param_groups for p in group["params"]]


def restore(built: "Built", folder: Path, before: Layout, now: Layout, mesh: Mesh) -> None:
    """Fill `built` from a checkpoint of layout `before`.

    Its folder must hold all parts, or with another number of replicas those of one.

    Raises:
        CheckpointError: a part is missing or damaged, a parameter is in none of them, or the two
            copies of a tied weight differ and would become one again.
    """
    listed = checkpoint.read_manifest(folder)
    there = [part.name for part in listed.parts if size_error(part, folder) is None]
    whole = whole_replicas(listed.names, there)
    first = whole[0].partition(".")[0].removeprefix("replica-") if whole else 0
    source = mesh.replica if before.replicas == now.replicas else int(first)
    saved = read_replica(folder, parts_of(folder, replica=source))

    own_rows = rows_of(mesh)
    for stage in built.stages:
        load_module(module_of(stage), saved.model, folder, own_rows, base=saved.base)
    stateless = _load_optimizer(built, saved, own_rows)
    boundaries = _boundaries(folder, before, whole, dp_rank=mesh.dp_rank % before.dp_size)
    for channel in built.engine.channels:
        # with another number of replicas they include samples of others, which are never used
        if (known := boundaries.get(channel_name(channel))) is not None:
            channel.codec.training.load_state_dict(known)
    built.lr_schedule.load_state_dict(saved.first_part["lr_schedule"])
    built.best.load_state_dict(saved.first_part.get("best", {}))
    built.engine.load_state_dict(saved.first_part["engine"])
    if built.samples is not None:
        built.samples.load_state_dict(saved.first_part["samples"])
    torch.manual_seed(hash((now, mesh.rank, built.lr_schedule.last_epoch)))
    if stateless:
        _log.warning("rank %d: no optimizer state for %s; it starts at zero", mesh.rank, stateless)
    if mesh.rank == 0:
        has_memories = any(boundaries.values())
        _log.warning("%s", "\n".join(_changes(folder, before, now, has_memories=has_memories)))


def rows_of(mesh: Mesh) -> OwnRows:
    """A rank's part of a parameter, or of the optimizer's state of it."""

    def own_rows(whole: Tensor) -> Tensor:
        parts = whole.chunk(mesh.shards)
        return parts[mesh.shard] if mesh.shard < len(parts) else whole[:0]

    return own_rows


def common_model(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
    """The model of all replicas in a part's state, by stage."""
    found: Mapping[str, Mapping[str, Tensor]] = state["global_model"] or state["model"]
    return found


def read_replica(folder: Path, parts: list[str]) -> ReplicaState:
    """Join the parts of one replica, with the common model of all replicas.

    Not with the replica's own weights: a reset exchange assumes that replicas are equal.
    """
    saved = ReplicaState({}, {}, {}, {}, {})
    states = [checkpoint.read_part(folder, part, mapped=ROWS) for part in parts]
    for shards in in_shards(states):
        saved.first_part = saved.first_part or dict(shards[0])
        saved.model.update(whole_model(shards))
        saved.base.update(saved_base(shards[0]))
        entries = [list(_by_parameter(state["optimizer"], state["parameters"])) for state in shards]
        for found in zip(*entries, strict=True):
            names, _, group = found[0]
            whole = _whole_entry([entry for _, entry, _ in found])
            for name in names:
                saved.optimizer[name], saved.groups[name] = whole, group
    return saved


def in_shards(states: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """States of parts in groups: the shards of the same stages together, in order."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for state in states:
        groups.setdefault(tuple(sorted(state["model"])), []).append(state)
    return [sorted(group, key=lambda s: int(s.get("shard", 0))) for group in groups.values()]


def whole_model(shards: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The common model of all replicas, of stages whose shards have these states."""
    models = [
        {name: tensor for stage in common_model(state).values() for name, tensor in stage.items()}
        for state in shards
    ]
    divided = set(shards[0].get("divided", ()))
    return {
        name: torch.cat([model[name] for model in models]) if name in divided else tensor
        for name, tensor in models[0].items()
    }


def _whole_entry(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state of a parameter; what is no scalar is divided as the parameter is."""
    return {
        key: torch.cat([entry[key] for entry in entries])
        if isinstance(value, Tensor) and value.dim() and len(entries) > 1
        else value
        for key, value in entries[0].items()
    }


def _by_parameter(
    optimizer: Mapping[str, Any], names: list[list[str]]
) -> Iterator[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    """(names, state, settings of its group) of every parameter of an optimizer's state dict."""
    for group in optimizer["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        for index in group["params"]:
            yield names[index], optimizer["state"].get(index, {}), settings


def load_module(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    folder: Path,
    own_rows: OwnRows = lambda whole: whole,
    *,
    base: Digests = MappingProxyType({}),
) -> None:
    """Load a stage's own tensors; `folder` is for messages, `own_rows` what is own of a parameter.

    `base` are digests of those that the tensors were trained with, and that files hold.

    Raises:
        CheckpointError: one is missing, or a tied weight has two different values there.
    """
    check_present(module, tensors, base, folder)
    own = {name: tensor for name, tensor in module.state_dict().items() if name in tensors}
    tied: dict[int, str] = {}
    for name, tensor in own.items():
        twin = tied.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if not torch.equal(tensors[name], tensors[twin]):
            raise CheckpointError(
                f"{folder}: {twin} and {name} were trained as separate weights and differ; with "
                "this layout they are one: keep a cut between them"
            )
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    module.load_state_dict(
        {name: own_rows(tensors[name]) if name in parameters else tensors[name] for name in own},
        strict=False,
    )


def _load_optimizer(built: "Built", saved: ReplicaState, own_rows: OwnRows) -> list[str]:
    """Load the saved state of every own parameter; return the names without one."""
    state = built.optimizer.state_dict()
    names, stateless = parameter_names(built), []
    for index, (name, *_) in enumerate(names):
        entry = saved.optimizer.get(name)
        if entry:
            state["state"][index] = {
                key: own_rows(value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in entry.items()
            }
        elif saved.optimizer:
            stateless.append(name)
    for group in state["param_groups"]:
        known = [saved.groups[names[i][0]] for i in group["params"] if names[i][0] in saved.groups]
        group.update(known[0] if known else {})
    built.optimizer.load_state_dict(state)
    return stateless


def _boundaries(
    folder: Path, before: Layout, whole: Collection[str], *, dp_rank: int
) -> dict[str, Any]:
    replica, shard = divmod(dp_rank, before.shards)
    found: dict[str, Any] = {}
    for part in parts_of(folder, replica=replica):
        if part not in whole:
            continue
        state = checkpoint.read_part(folder, part, mapped=ROWS)
        if int(state.get("shard", 0)) == shard:
            found.update(state["boundaries"])
    return found


def moved_samples(before: int, now: int) -> tuple[int, int]:
    """Of how many samples (second number) how many are new to their replica."""
    period = math.lcm(before, now)
    new = sum(sample % before != sample % now % before for sample in range(period))
    return new, period


def _changes(folder: Path, before: Layout, now: Layout, *, has_memories: bool) -> list[str]:
    lines = [
        f"{folder} was saved with {before}; this run has {now}: weights and optimizer state are "
        "read by name; dropout draws different numbers"
    ]
    moved = sorted(set(now.cuts) - set(before.cuts))
    if moved and has_memories:
        lines.append(f"the activation cache of cuts {moved} starts empty: these cuts are new")
    new, of = moved_samples(before.dp_size, now.dp_size)
    owner = "replica" if before.shards == now.shards else "pipeline"
    if has_memories and new:
        lines.append(
            f"{new} of every {of} samples moved to another {owner} and are sent as first visits"
        )
    if before.replicas > 1:
        lines.append("the state of the replica exchange is reset")
        lines.append("all replicas start from the same weights")
    if before.shards > 1 and now.shards > 1:
        lines.append("learned levels and cached weights of shards are reset")
    return lines
