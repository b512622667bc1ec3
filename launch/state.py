"""A rank's whole state, and how all ranks save and restore theirs together, bit for bit."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from launch import checkpoint
from launch.build import Built
from launch.checkpoint import CheckpointError, Part
from launch.config import RunConfig
from launch.handshake import versions
from launch.messages import gather_json
from launch.session import Session

_MAY_CHANGE = ("run", "eval", "checkpoint")


def save(root: Path, step: int, *, built: Built, session: Session, config: RunConfig) -> None:
    """Save all ranks' state as `root/step-<step>`; `step` optimizer steps are done.

    Each rank writes its part; the first rank of each host then writes the manifest and publishes.
    """
    mesh = session.mesh
    if session.local_rank == 0:
        checkpoint.begin(root, step)
    gather_json(mesh, "folder is there")
    folder = checkpoint.partial_folder(root, step)
    mine = checkpoint.write_part(folder, _part_name(session), _collect(built))
    parts = [Part(**fields) for fields in gather_json(mesh, asdict(mine))]
    if session.local_rank == 0:
        meta = {"config": config.shared(), "versions": versions()}
        checkpoint.finish(root, step, parts=parts, meta=meta)
        checkpoint.prune(root, config.checkpoint.keep)
    gather_json(mesh, "published")


def restore(root: Path, *, built: Built, session: Session, config: RunConfig) -> int:
    """Restore the newest step of all ranks (the oldest of their newest); return how many are done.

    Raises:
        CheckpointError: there is none, a file is damaged, or it was made with another config.
    """
    try:
        newest, problem = checkpoint.latest(root), None
    except CheckpointError as error:
        newest, problem = None, str(error)
    _refuse_together(session, problem)
    step = min(found or 0 for found in gather_json(session.mesh, newest))
    folder = root / f"step-{step}"
    try:
        if step == 0:
            raise CheckpointError(f"{root}: some rank has no checkpoint; train without --resume")
        _check_config(folder, config)
        _distribute(built, checkpoint.read_part(folder, _part_name(session)))
    except CheckpointError as error:
        problem = str(error)
    _refuse_together(session, problem)
    return step


def _refuse_together(session: Session, problem: str | None) -> None:
    """Raise on every rank what went wrong on one, so that none waits for another."""
    problems = [text for text in gather_json(session.mesh, problem) if text]
    if problems:
        raise CheckpointError(problems[0])


def _part_name(session: Session) -> str:
    return f"replica-{session.mesh.replica}.rank-{session.mesh.position}"


def _collect(built: Built) -> dict[str, Any]:
    return {
        "model": {str(s.stage_index): _module(s).state_dict() for s in built.stages},
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


def _place(channel: Any) -> str:
    return f"cut-{channel.cut}.{('forward', 'backward')[channel.direction]}"


def _check_config(folder: Path, config: RunConfig) -> None:
    """Refuse to go on with other settings than the checkpoint's, except those that may change."""
    before, now = checkpoint.read_manifest(folder).meta["config"], config.shared()
    for section in now:
        if section not in _MAY_CHANGE and before.get(section) != now[section]:
            raise CheckpointError(
                f"{folder}: was made with {section} = {before.get(section)}, this run has "
                f"{now[section]}; change it back, or train without --resume"
            )
