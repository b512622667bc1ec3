"""A rank's whole state, and how all ranks save and restore theirs together, bit for bit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launch import checkpoint
from launch.build import Built
from launch.checkpoint import CheckpointError, Part
from launch.config import RunConfig
from launch.handshake import differences
from launch.messages import gather_json
from launch.session import Session
from pipeline.channel import Channel

_MAY_CHANGE = (
    *("config.run.name", "config.eval.", "config.checkpoint."),
    "config.pipeline.peer_timeout_s",
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
            self._check_facts(folder)
            _distribute(self.built, checkpoint.read_part(folder, self._part))
        except CheckpointError as error:
            problem = str(error)
        self._refuse_together(problem)
        return step

    @property
    def _part(self) -> str:
        return f"replica-{self.session.mesh.replica}.rank-{self.session.mesh.position}"

    def _refuse_together(self, problem: str | None) -> None:
        """Raise on every rank what went wrong on one, so that none waits for another."""
        problems = [text for text in gather_json(self.session.mesh, problem) if text]
        if problems:
            raise CheckpointError(problems[0])

    def _check_facts(self, folder: Path) -> None:
        """Refuse to go on with other data or settings, except those that may change."""
        changed = [
            f"{name} = {before}, this run has {now}"
            for name, before, now in differences(
                checkpoint.read_manifest(folder).meta, dict(self.facts)
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
        "model": {str(s.stage_index): _module(s).state_dict() for s in built.stages},
        "global_model": _global_model(built),
        "optimizer": built.optimizer.state_dict(),
        "lr_schedule": {"last_epoch": built.lr_schedule.last_epoch},
        "engine": built.engine.state_dict(),
        "sync": built.sync.state_dict(),
        "boundaries": {
            _place(channel): channel.boundaries["train"].state_dict()
            for stage in built.stages
            for channel in stage.channels.all()
        },
        "rng": torch.random.get_rng_state(),
    }


def _global_model(built: Built) -> dict[str, Any] | None:
    """The model to use after training, where it is not the one that each replica trains on."""
    if built.sync.replicas_equal:
        return None
    with built.sync.global_parameters():
        return {
            str(stage.stage_index): {
                name: weight.clone() for name, weight in _module(stage).state_dict().items()
            }
            for stage in built.stages
        }


def _distribute(built: Built, state: Mapping[str, Any]) -> None:
    for stage in built.stages:
        _module(stage).load_state_dict(state["model"][str(stage.stage_index)])
        for channel in stage.channels.all():
            channel.boundaries["train"].load_state_dict(state["boundaries"][_place(channel)])
    built.optimizer.load_state_dict(state["optimizer"])
    built.lr_schedule.last_epoch = state["lr_schedule"]["last_epoch"]
    built.engine.load_state_dict(state["engine"])
    built.sync.load_state_dict(state["sync"])
    torch.random.set_rng_state(state["rng"])


def _module(stage: Any) -> torch.nn.Module:
    module: torch.nn.Module = stage.submod
    return module


def _place(channel: Channel) -> str:
    return f"cut-{channel.cut}.{('forward', 'backward')[channel.direction]}"
