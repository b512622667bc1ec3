"""Resume under other cuts, another schedule or another number of replicas.

Parts are then read by the names of parameters: weights and optimizer state are exact. A memory is
kept where its cut and its samples stayed. What else belongs to places (memories of moved cuts, what
the exchange between replicas remembers, random numbers of dropout) starts anew, and is logged.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.files import CheckpointError
from thinpipe.launch.components import Built
from thinpipe.pipeline.comm.channel import Channel
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.schedule import stage_to_rank
from thinpipe.pipeline.wire.header import DIRECTIONS

_log = logging.getLogger(__name__)


class Layout(NamedTuple):
    """Which layers a rank holds, and which samples: `holders[i]` is the rank of stage i."""

    cuts: tuple[int, ...]
    holders: tuple[int, ...]
    replicas: int

    @classmethod
    def of(cls, pipeline: Mapping[str, Any]) -> "Layout":
        """The layout of a [pipeline] section."""
        config = PipelineConfig.model_validate(pipeline)
        ranks = stage_to_rank(config.schedule, stages=config.stages, ranks=config.pipeline_ranks)
        return cls(config.cuts, tuple(ranks[stage] for stage in sorted(ranks)), config.replicas)

    def __str__(self) -> str:
        return f"cuts {list(self.cuts)}, replicas {self.replicas}"


@dataclass
class Whole:
    """What one replica knew, by names that do not depend on the cut."""

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    first_part: dict[str, Any]


def part_name(replica: int, position: int) -> str:
    """Name of the part of a rank."""
    return f"replica-{replica}.rank-{position}"


def parts_of(folder: Path, *, replica: int) -> list[str]:
    """Names of a replica's parts in a checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    listed = checkpoint.read_manifest(folder).parts
    return [part.name for part in listed if part.name.startswith(f"replica-{replica}.")]


def place_of(channel: Channel) -> str:
    """Name of a direction of a cut."""
    return f"cut-{channel.codec.cut}.{DIRECTIONS[channel.codec.direction]}"


def module_of(stage: Any) -> nn.Module:
    """The module of a stage."""
    module: nn.Module = stage.submod
    return module


def parameter_names(built: Built) -> list[list[str]]:
    """All names of each parameter, in the order of the optimizer's state."""
    names: dict[int, list[str]] = {}
    for stage in built.stages:
        for name, parameter in module_of(stage).named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return [names[id(p)] for group in built.optimizer.param_groups for p in group["params"]]


def restore(built: Built, folder: Path, before: Layout, now: Layout, mesh: Mesh) -> None:
    """Fill `built` from a checkpoint of layout `before`; its folder must hold all parts.

    Raises:
        CheckpointError: a part is missing or damaged, a parameter is in none of them, or the two
            copies of a tied weight have parted and are to be one.
    """
    source = mesh.replica if before.replicas == now.replicas else 0
    whole = read_whole(folder, parts_of(folder, replica=source))
    for stage in built.stages:
        fill_module(module_of(stage), whole.model, folder)
    cold = _fill_optimizer(built, whole)
    boundaries = _boundaries(folder, replica=mesh.replica % before.replicas)
    _fill_memories(built, boundaries)
    built.lr_schedule.last_epoch = whole.first_part["lr_schedule"]["last_epoch"]
    built.engine.load_state_dict(whole.first_part["engine"])
    torch.manual_seed(hash((now, mesh.rank, built.lr_schedule.last_epoch)))
    if cold:
        _log.warning("rank %d: no optimizer state for %s; it starts at zero", mesh.rank, cold)
    if mesh.rank == 0:
        remembers = any(boundaries.values())
        _log.warning("%s", "\n".join(_account(folder, before, now, whole, remembers=remembers)))


def common_model(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
    """The weights that all replicas stand for in a part's state, by stage."""
    found: Mapping[str, Mapping[str, Tensor]] = state["global_model"] or state["model"]
    return found


def read_whole(folder: Path, parts: list[str]) -> Whole:
    """Join the parts of one replica, with the weights that all replicas stand for.

    Its own weights would not do: an exchange that starts anew takes replicas to be equal.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    whole = Whole({}, {}, {}, {})
    for part in parts:
        state = checkpoint.read_part(folder, part, mapped=ROWS)
        whole.first_part = whole.first_part or state
        for stage in common_model(state).values():
            whole.model.update(stage)
        for names, entry, group in _by_parameter(state["optimizer"], state["parameters"]):
            for name in names:
                whole.optimizer[name], whole.groups[name] = entry, group
    return whole


def _by_parameter(
    optimizer: Mapping[str, Any], names: list[list[str]]
) -> Iterator[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    """(names, state, settings of its group) of every parameter of an optimizer's state dict."""
    for group in optimizer["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        for index in group["params"]:
            yield names[index], optimizer["state"].get(index, {}), settings


def fill_module(module: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load a stage's own tensors; `folder` is for messages.

    Raises:
        CheckpointError: one is missing, or what is one weight here had parted there.
    """
    own = module.state_dict()
    missing = sorted(own.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{folder}: no part holds {', '.join(missing[:4])}")
    places: dict[int, str] = {}
    for name, tensor in own.items():
        twin = places.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if not torch.equal(tensors[name], tensors[twin]):
            raise CheckpointError(
                f"{folder}: {twin} and {name} were trained as separate weights and differ; here "
                "they are one: keep a cut between them"
            )
    module.load_state_dict({name: tensors[name] for name in own})


def _fill_optimizer(built: Built, whole: Whole) -> list[str]:
    """Load what is known of every own parameter; return the names without a state."""
    state = built.optimizer.state_dict()
    names, cold = parameter_names(built), []
    for index, (name, *_) in enumerate(names):
        entry = whole.optimizer.get(name)
        if entry:
            state["state"][index] = entry
        elif whole.optimizer:
            cold.append(name)
    for group in state["param_groups"]:
        known = [whole.groups[names[i][0]] for i in group["params"] if names[i][0] in whole.groups]
        group.update(known[0] if known else {})
    built.optimizer.load_state_dict(state)
    return cold


def _boundaries(folder: Path, *, replica: int) -> dict[str, Any]:
    """What the ends of a replica's cuts remembered, by place."""
    found: dict[str, Any] = {}
    for part in parts_of(folder, replica=replica):
        found.update(checkpoint.read_part(folder, part, mapped=ROWS)["boundaries"])
    return found


def _fill_memories(built: Built, boundaries: Mapping[str, Any]) -> None:
    """Load what belongs to own places.

    With another number of replicas they hold samples that are now another's: nobody asks for them.
    """
    for channel in built.engine.channels:
        known = boundaries.get(place_of(channel))
        if known is not None:
            channel.codec.training.load_state_dict(known)


def moved_samples(before: int, now: int) -> tuple[int, int]:
    """How many of how many samples a replica is given that its part of the checkpoint lacks."""
    period = math.lcm(before, now)
    new = sum(sample % before != sample % now % before for sample in range(period))
    return new, period


def _account(
    folder: Path, before: Layout, now: Layout, whole: Whole, *, remembers: bool
) -> list[str]:
    lines = [
        f"{folder} was saved with {before}; this run has {now}: weights and optimizer state are "
        "read by name; dropout, where there is any, draws other numbers"
    ]
    moved = sorted(set(now.cuts) - set(before.cuts))
    if moved and remembers:
        lines.append(f"memories at cuts {moved} start empty: their cuts are new")
    new, of = moved_samples(before.replicas, now.replicas)
    if remembers and new:
        lines.append(f"{new} of every {of} samples are now another replica's: sent like new ones")
    if before.replicas > 1:
        lines.append("what the exchange between replicas remembers starts anew")
        lines.append("all replicas start from the same weights")
    return lines
