"""A rank's whole state, and how all ranks save and restore theirs together, bit for bit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launch import checkpoint
from launch.build import Built
from launch.checkpoint import CheckpointError, Part
from launch.config import BoundaryConfig, RunConfig, boundary_at
from launch.handshake import differences
from launch.messages import gather_json
from launch.relayout import (
    Layout,
    module_of,
    parameter_names,
    part_name,
    place_of,
    restore,
)
from launch.session import Session

_MAY_CHANGE = (
    *("config.run.name", "config.eval.", "config.checkpoint."),
    *(f"config.pipeline.{name}" for name in ("cuts", "ranks", "replicas", "schedule", "depth")),
    *(f"config.pipeline.{name}" for name in ("microbatches", "device", "peer_timeout_s")),
)


class Resume(NamedTuple):
    """Whether to go on from a checkpoint, and from which step if not from the newest."""

    wanted: bool
    step: int | None = None


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores the state of one run, all ranks together.

    `facts` is what a resumed run must have in common with the one that saved: config and data.
    """

    root: Path
    keep: int
    built: Built
    session: Session
    facts: Mapping[str, Any]

    def save(self, step: int) -> None:
        """Save as `root/step-<step>`; `step` optimizer steps are done.

        Each rank writes its part; the first rank of each host writes the manifest and publishes.
        """
        mesh = self.session.mesh
        if self.session.local_rank == 0:
            checkpoint.begin(self.root, step)
        gather_json(mesh, "folder is there")
        folder = checkpoint.partial_folder(self.root, step)
        mine = checkpoint.write_part(folder, self._part, _collect(self.built))
        parts = [Part(**fields) for fields in gather_json(mesh, asdict(mine))]
        if self.session.local_rank == 0:
            checkpoint.finish(self.root, step, parts=parts, meta=self.facts)
            checkpoint.prune(self.root, self.keep)
        gather_json(mesh, "published")

    def restore(self, step: int | None) -> int:
        """Restore a step, by default the newest that all ranks have; return how many are done.

        Raises:
            CheckpointError: on every rank, if one has none, a damaged one, or one of another run.
        """
        problem = None
        try:
            newest = checkpoint.latest(self.root) if step is None else step
        except CheckpointError as error:
            newest, problem = None, str(error)
        self._refuse_together(problem)
        step = min(found or 0 for found in gather_json(self.session.mesh, newest))
        folder = self.root / f"step-{step}"
        try:
            if step == 0:
                raise CheckpointError(f"{self.root}: some rank has no checkpoint to resume from")
            saved = checkpoint.read_manifest(folder).meta
            self._check_facts(folder, saved)
            self._fill(folder, *(Layout.of(f["config"]["pipeline"]) for f in (saved, self.facts)))
        except CheckpointError as error:
            problem = str(error)
        self._refuse_together(problem)
        return step

    @property
    def _part(self) -> str:
        return part_name(self.session.mesh.replica, self.session.mesh.position)

    def _fill(self, folder: Path, before: Layout, now: Layout) -> None:
        if before == now:
            _distribute(self.built, checkpoint.read_part(folder, self._part))
        else:
            restore(self.built, folder, before, now, self.session.mesh)

    def _refuse_together(self, problem: str | None) -> None:
        """Raise on every rank what went wrong on one, so that none waits for another."""
        problems = [text for text in gather_json(self.session.mesh, problem) if text]
        if problems:
            raise CheckpointError(problems[0])

    def _check_facts(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Refuse to go on with other data or settings, except those that may change."""
        stayed = set.intersection(*(_cuts(facts) for facts in (saved, self.facts)))
        changed = [
            f"{name} = {before}, this run has {now}"
            for name, before, now in differences(
                _by_cut(saved, stayed), _by_cut(self.facts, stayed)
            )
            if not name.startswith(_MAY_CHANGE)
        ]
        if changed:
            raise CheckpointError(
                f"{folder} was made with {'; with '.join(changed[:4])}; change it back, or train "
                "without --resume"
            )


def saved_so_far(config: RunConfig) -> str:
    """What a user whose run has stopped can do."""
    try:
        step = checkpoint.latest(config.run.path / "checkpoints")
    except CheckpointError:
        step = None
    if step is None:
        return "nothing was saved yet"
    return f"everything up to step {step} is saved; --resume goes on from there"


def _collect(built: Built) -> dict[str, Any]:
    return {
        "model": {str(s.stage_index): module_of(s).state_dict() for s in built.stages},
        "optimizer": built.optimizer.state_dict(),
        "parameters": parameter_names(built),
        "lr_schedule": {"last_epoch": built.lr_schedule.last_epoch},
        "engine": built.engine.state_dict(),
        "sync": built.sync.state_dict(),
        "boundaries": {
            place_of(channel): channel.boundaries["train"].state_dict()
            for stage in built.stages
            for channel in stage.channels.all()
        },
        "rng": torch.random.get_rng_state(),
    }


def _distribute(built: Built, state: Mapping[str, Any]) -> None:
    for stage in built.stages:
        module_of(stage).load_state_dict(state["model"][str(stage.stage_index)])
        for channel in stage.channels.all():
            channel.boundaries["train"].load_state_dict(state["boundaries"][place_of(channel)])
    built.optimizer.load_state_dict(state["optimizer"])
    built.lr_schedule.last_epoch = state["lr_schedule"]["last_epoch"]
    built.engine.load_state_dict(state["engine"])
    built.sync.load_state_dict(state["sync"])
    torch.random.set_rng_state(state["rng"])


def _cuts(facts: Mapping[str, Any]) -> set[int]:
    return set(facts["config"]["pipeline"]["cuts"])


def _by_cut(facts: Mapping[str, Any], cuts: set[int]) -> dict[str, Any]:
    """Facts with the boundaries spelt out for some cuts: others may have any."""
    tables = [BoundaryConfig.model_validate(table) for table in facts["config"]["boundary"]]
    boundaries = {
        str(cut): boundary_at(tables, cut).model_dump(mode="json", exclude={"cut"}) for cut in cuts
    }
    return {**facts, "config": {**facts["config"], "boundary": boundaries}}
