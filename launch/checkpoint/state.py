"""Saving and restoring a run's whole state, all ranks together, bit for bit."""

import contextlib
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
    channel_name,
    module_of,
    parameter_names,
    part_name,
    restore,
)
from thinpipe.launch.components import Built
from thinpipe.launch.config.diff import changed_settings, describe_changes, epochs_hint
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.load import DataConfig, files
from thinpipe.launch.distributed.gather import gather_json
from thinpipe.launch.distributed.handshake import differences
from thinpipe.launch.distributed.network import ROUND
from thinpipe.launch.distributed.session import Session

_log = logging.getLogger(__name__)


class Resume(NamedTuple):
    """Whether to resume from a checkpoint, and from which step if not the newest.

    If not `required`, a run without a checkpoint starts from scratch.
    """

    wanted: bool
    step: int | None = None
    required: bool = True


def after_restart(resume: Resume) -> Resume:
    """The request, or an optional resume if ranks were restarted after a failure.

    torchrun's own count leaves out restarts for a machine that came back.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    again = restarts > 0 or int(os.environ.get(ROUND, "1")) > 1
    return Resume(True, required=False) if again and not resume.wanted else resume


def common_resume(session: Session, root: Path, resume: Resume) -> Resume:
    """The common decision: agents count restarts differently, so one request is enough."""
    try:
        saved = checkpoint.latest(root) is not None
    except CheckpointError:
        saved = True  # restoring will report the damage
    answers = gather_json(session.transport, [*resume, saved])
    requests = [Resume(*request) for *request, _ in answers if request[0]]
    required = any(request.required for request in requests)
    if not requests or not (required or any(saved for *_, saved in answers)):
        return Resume(False)
    return Resume(True, next((r.step for r in requests if r.step is not None), None), required)


def saved_epochs(session: Session, root: Path, resume: Resume) -> int:
    """Whole epochs that the checkpoint to resume from has done, as all ranks know it.

    Restoring reports what is wrong with it.
    """
    done = 0
    with contextlib.suppress(CheckpointError, KeyError):
        step = (resume.step or checkpoint.latest(root) or 0) if resume.wanted else 0
        if step:
            done = step // checkpoint.read_manifest(root / f"step-{step}").meta["steps_per_epoch"]
    return int(min(gather_json(session.transport, done)))


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores the state of one run, all ranks together.

    `facts` (config and data digests) must be equal when the run is resumed; `data` is used in the
    error message if they are not.
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
        gather_json(self.session.transport, "folder exists")
        folder = checkpoint.partial_folder(self.root, step)
        mine = checkpoint.write_part(folder, self._part, _collect(self.built))
        parts = [Part(**fields) for fields in gather_json(self.session.transport, asdict(mine))]
        if self.session.local_rank == 0:
            checkpoint.finish(self.root, step, parts=parts, meta=self.facts)
            checkpoint.prune(self.root, self.keep)
        gather_json(self.session.transport, "published")

    def restore(self, step: int | None) -> int:
        """Restore a step, by default the newest that all ranks have; return the steps done.

        Raises:
            CheckpointError: on every rank, if one lacks it or it is damaged or of another run.
        """
        problem = None
        try:
            newest = checkpoint.latest(self.root) if step is None else step
        except CheckpointError as error:
            newest, problem = None, str(error)
        self._raise_everywhere(problem)
        step = min(found or 0 for found in gather_json(self.session.transport, newest))
        folder = self.root / f"step-{step}"
        try:
            if step == 0:
                raise CheckpointError(f"{self.root}: a rank has no checkpoint to resume from")
            saved = checkpoint.read_manifest(folder).meta
            self._check_facts(folder, saved)
            self._load(folder, *(Layout.of(f["config"]["pipeline"]) for f in (saved, self.facts)))
        except CheckpointError as error:
            problem = str(error)
        self._raise_everywhere(problem)
        return step

    @property
    def _part(self) -> str:
        return part_name(self.session.mesh.replica, self.session.mesh.position)

    def _load(self, folder: Path, before: Layout, now: Layout) -> None:
        if before == now:
            state = checkpoint.read_part(folder, self._part, mapped=ROWS)  # may be larger than RAM
            _distribute(self.built, state)
        else:
            restore(self.built, folder, before, now, self.session.mesh)

    def _raise_everywhere(self, problem: str | None) -> None:
        """Raise one rank's problem on all of them, so that none waits for it."""
        problems = [text for text in gather_json(self.session.transport, problem) if text]
        if problems:
            raise CheckpointError(problems[0])

    def _check_facts(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Check that data and settings that may not change are those of the checkpoint."""
        changed = changed_settings(saved["config"], self.facts["config"])
        differing = describe_changes(changed)
        samples = differences(saved.get("data"), self.facts.get("data"), "data")
        if samples and not any(change.name.startswith("data.") for change in changed):
            differing.append(self._other_samples(folder, [name for name, *_ in samples]))
        if differing:
            it = "it" if len(differing) == 1 else "them"
            raise CheckpointError(
                f"{folder} was made with {'; with '.join(differing)}; change {it} back"
                f"{epochs_hint(changed)}, or train without --resume"
            )

    def _other_samples(self, folder: Path, sets: Sequence[str]) -> str:
        """Describe how the samples differ from those of a checkpoint."""
        saved_s = checkpoint.saved_at(folder)
        late = [str(path) for path in files(self.data) if path.stat().st_mtime > saved_s]
        found = f"written since then: {', '.join(late[:4])}" if late else "no file is newer"
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        return (
            f"other samples ({' and '.join(sets)} differ; {self.data.source}, data.tokenizer = "
            f"{self.data.tokenizer!r}: {found}{more}; restore the old content or point to a copy "
            "of it)"
        )


def saved_so_far(config: RunConfig) -> str:
    """How to continue a run that has stopped."""
    try:
        step = checkpoint.latest(config.run.path / "checkpoints")
    except CheckpointError:
        step = None
    if step is None:
        return "no checkpoint was saved yet"
    return f"everything up to step {step} is saved; continue from there with --resume"


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
            channel_name(channel): channel.codec.training.state_dict()
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
    """The replicas' common model, if it differs from their own weights."""
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
        found = state["boundaries"].get(channel_name(channel))
        if found is not None:
            channel.codec.training.load_state_dict(found)
        elif channel.codec.memory is not None:
            _log.warning(
                "%s: no memory was saved; its samples are sent as first visits",
                channel_name(channel),
            )
    built.optimizer.load_state_dict(state["optimizer"])
    built.lr_schedule.last_epoch = state["lr_schedule"]["last_epoch"]
    built.engine.load_state_dict(state["engine"])
    built.sync.load_state_dict(state["sync"])
    torch.random.set_rng_state(state["rng"])
    if state.get("gpu_rng") is not None:
        for device, rng in zip(_gpus(built), state["gpu_rng"], strict=False):
            torch.cuda.set_rng_state(rng, device)
