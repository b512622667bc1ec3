"""A rank's whole state, and how all ranks save and restore theirs together, bit for bit."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.files import CheckpointError, Part
from thinpipe.launch.checkpoint.reshard import (
    Layout,
    module_of,
    parameter_names,
    part_name,
    place_of,
    restore,
)
from thinpipe.launch.components import Built
from thinpipe.launch.config.diff import changed_settings, tell_changes, why_epochs_stay
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.load import DataConfig, files
from thinpipe.launch.distributed.gather import gather_json
from thinpipe.launch.distributed.handshake import differences
from thinpipe.launch.distributed.session import Session

_log = logging.getLogger(__name__)


class Resume(NamedTuple):
    """Whether to go on from a checkpoint, and from which step if not from the newest.

    Where it is not `required`, a run that has saved nothing yet starts anew.
    """

    wanted: bool
    step: int | None = None
    required: bool = True


def after_restart(resume: Resume) -> Resume:
    """What was asked for; torchrun's agents start ranks again after a failure: then, go on."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return resume if resume.wanted or not restarts else Resume(True, required=False)


def agree_to_resume(session: Session, root: Path, resume: Resume) -> Resume:
    """One answer for all ranks: agents count their restarts differently, so one is enough."""
    try:
        saved = checkpoint.latest(root) is not None
    except CheckpointError:
        saved = True  # restoring will say what is wrong with it
    told = gather_json(session.transport, [*resume, saved])
    asked = [Resume(*answer) for *answer, _ in told if answer[0]]
    required = any(answer.required for answer in asked)
    if not asked or not (required or any(saved for *_, saved in told)):
        return Resume(False)
    return Resume(True, next((a.step for a in asked if a.step is not None), None), required)


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores the state of one run, all ranks together.

    `facts` is what a resumed run must have in common with the one that saved: config and data;
    `data` says where the latter is, for the message that refuses.
    """

    root: Path
    keep: int
    built: Built
    session: Session
    facts: Mapping[str, Any]
    data: DataConfig = field(default_factory=DataConfig)

    def save(self, step: int) -> None:
        """Save as `root/step-<step>`; `step` optimizer steps are done.

        Each rank writes its part; the first rank of each host writes the manifest and publishes.
        """
        if self.session.local_rank == 0:
            checkpoint.begin(self.root, step)
        gather_json(self.session.transport, "folder is there")
        folder = checkpoint.partial_folder(self.root, step)
        mine = checkpoint.write_part(folder, self._part, _collect(self.built))
        parts = [Part(**fields) for fields in gather_json(self.session.transport, asdict(mine))]
        if self.session.local_rank == 0:
            checkpoint.finish(self.root, step, parts=parts, meta=self.facts)
            checkpoint.prune(self.root, self.keep)
        gather_json(self.session.transport, "published")

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
        step = min(found or 0 for found in gather_json(self.session.transport, newest))
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
            state = checkpoint.read_part(folder, self._part, mapped=ROWS)  # may not fit into memory
            _distribute(self.built, state)
        else:
            restore(self.built, folder, before, now, self.session.mesh)

    def _refuse_together(self, problem: str | None) -> None:
        """Raise on every rank what went wrong on one, so that none waits for another."""
        problems = [text for text in gather_json(self.session.transport, problem) if text]
        if problems:
            raise CheckpointError(problems[0])

    def _check_facts(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Refuse to go on with other data or settings, except those that may change."""
        changed = changed_settings(saved["config"], self.facts["config"])
        told = tell_changes(changed)
        samples = differences(saved.get("data"), self.facts.get("data"), "data")
        if samples and not any(change.name.startswith("data.") for change in changed):
            told.append(self._other_samples(folder, [name for name, *_ in samples]))
        if told:
            it = "it" if len(told) == 1 else "them"
            raise CheckpointError(
                f"{folder} was made with {'; with '.join(told)}; change {it} back"
                f"{why_epochs_stay(changed)}, or train without --resume"
            )

    def _other_samples(self, folder: Path, sets: Sequence[str]) -> str:
        """What is known of samples that differ from those of a checkpoint."""
        saved_s = checkpoint.saved_at(folder)
        late = [str(path) for path in files(self.data) if path.stat().st_mtime > saved_s]
        found = f"written since then: {', '.join(late[:4])}" if late else "no file is newer"
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        return (
            f"other samples ({' and '.join(sets)} differ; {self.data.source}, data.tokenizer = "
            f"{self.data.tokenizer!r}: {found}{more}; name a copy of the old content, or put it "
            "there)"
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
    gpu_rng = [torch.cuda.get_rng_state(device) for device in _gpus(built)]
    return {
        "model": {str(s.stage_index): module_of(s).state_dict() for s in built.stages},
        "global_model": _global_model(built),
        "optimizer": built.optimizer.state_dict(),
        "parameters": parameter_names(built),
        "lr_schedule": {"last_epoch": built.lr_schedule.last_epoch},
        "engine": built.engine.state_dict(),
        "sync": built.sync.state_dict(),
        "boundaries": {
            place_of(channel): channel.codec.training.state_dict()
            for channel in built.engine.channels
        },
        "rng": torch.random.get_rng_state(),
        "gpu_rng": torch.stack(gpu_rng) if gpu_rng else None,
    }


def _gpus(built: Built) -> list[torch.device]:
    """Those that hold parameters, the first one first."""
    modules = [module_of(stage) for stage in built.stages]
    devices = dict.fromkeys(p.device for module in modules for p in module.parameters())
    return [device for device in devices if device.type == "cuda"]


def _global_model(built: Built) -> dict[str, Any] | None:
    """The model to use after training, where it is not the one that each replica trains on."""
    if built.sync.replicas_equal:
        return None
    with built.sync.global_parameters():
        return {
            str(stage.stage_index): {
                name: weight.clone() for name, weight in module_of(stage).state_dict().items()
            }
            for stage in built.stages
        }


def _distribute(built: Built, state: Mapping[str, Any]) -> None:
    for stage in built.stages:
        module_of(stage).load_state_dict(state["model"][str(stage.stage_index)])
    for channel in built.engine.channels:
        found = state["boundaries"].get(place_of(channel))
        if found is not None:
            channel.codec.training.load_state_dict(found)
        elif channel.codec.memory is not None:
            _log.warning("%s: nothing was saved of it; its samples are new", place_of(channel))
    built.optimizer.load_state_dict(state["optimizer"])
    built.lr_schedule.last_epoch = state["lr_schedule"]["last_epoch"]
    built.engine.load_state_dict(state["engine"])
    built.sync.load_state_dict(state["sync"])
    torch.random.set_rng_state(state["rng"])
    if state.get("gpu_rng") is not None:
        for device, rng in zip(_gpus(built), state["gpu_rng"], strict=False):
            torch.cuda.set_rng_state(rng, device)
