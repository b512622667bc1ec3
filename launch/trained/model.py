"""The model of a checkpoint: its tensors, and as an ordinary module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.base import Digests, check_present, saved_base
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.reshard import (
    in_shards,
    load_module,
    module_of,
    parts_of,
    rows_of,
    whole_model,
)
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig, load_run
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.trained.source import source_of
from thinpipe.pipeline.models.own.example import Functions
from thinpipe.pipeline.models.paths import user_path


@dataclass(frozen=True)
class Trained:
    """What a run trained, up to a step; `tensors` go by the names of parameters in stages.

    `base` are digests of frozen weights that the run read from files.
    """

    config: RunConfig
    folder: Path
    step: int
    tensors: Mapping[str, Tensor]
    base: Digests

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors under the names of the whole model; LoRA is merged.

        Raises:
            CheckpointError: the files of frozen weights have changed.
        """
        return self.config.model.whole_state({**self._read_base(), **self.tensors})

    def _read_base(self) -> dict[str, Tensor]:
        if not self.base:
            return {}
        from thinpipe.pipeline.models.hf.quantized import plain_state

        model = self.config.model
        whole = model.build(0, model.layers, seed=0, device="cpu")
        check_present(whole, self.tensors, self.base, self.folder)
        return plain_state(whole)


Step = int | Literal["best"] | None
"""Of a checkpoint: a number, that of the best evaluation, or the newest."""


def read_trained(
    run_folder: Path, *, step: Step = None, functions: Functions | None = None
) -> Trained:
    """The model of a checkpoint, by default of the newest; its parts must all be here.

    `step` is a number, or "best" for that of the best evaluation (`eval.best`).

    `functions` are taken in place of those that the run's settings name.

    Raises:
        ConfigError: the folder is not a run's.
        CheckpointError: there is no such checkpoint, it is damaged, or parts are on other machines.
    """
    config = load_run(run_folder, functions=functions)
    root = run_folder / "checkpoints"
    step = _number(root, step)
    folder = root / f"step-{step}"
    manifest = checkpoint.read_manifest(folder)
    model, facts = config.model, manifest.meta["config"]
    if changed := model.changed_since(facts["model"]):
        raise CheckpointError(f"{folder}: {changed} has changed since; restore the original files")
    tensors, base = dict[str, Tensor](), dict[str, str]()
    needed = parts_of(folder, replica=0)
    paths = [part.path(folder) for part in manifest.parts if part.name in needed]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: {', '.join(missing)} are not here; copy that folder from the machines that "
            "saved them into this one, or use a shared disk"
        )
    states = [checkpoint.read_part(folder, part) for part in needed]
    for shards in in_shards(states):
        tensors |= whole_model(shards)
        base |= saved_base(shards[0])
    if model.tie_embeddings == "exact":
        # one weight, though optimizers on unlike processors round its two copies apart
        for name, tied_to in model.tied_names.items():
            if tied_to in tensors:
                tensors[name] = tensors[tied_to]
    return Trained(config, folder, step, tensors, base)


def _number(root: Path, step: Step) -> int:
    if isinstance(step, int):
        return step
    found = checkpoint.best(root) if step == "best" else checkpoint.newest(root)
    if found is not None:
        return found
    if step == "best":
        raise CheckpointError(
            f"{root}: no evaluation chose a best step; train with eval.best, or name a step"
        )
    damaged = sorted(path.name for path in root.glob("step-*"))
    if damaged:
        raise CheckpointError(
            f"{root}: none of {', '.join(damaged)} is whole; restore its files, or train again"
        )
    raise CheckpointError(f"{root}: no checkpoint was saved yet; train first")


def load(
    run_folder: str | Path, *, step: Step = None, model: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The model that a run trained, as an ordinary module in evaluation mode, on the CPU.

    A model of the library transformers is one of its classes; ThinPipe's own takes token ids
    [B, T] and returns logits [B, T, V] (or [B, C]). `model` makes a custom one; by
    default it is the function of the run's settings (`model.factory`), of a program's run that of
    the program, which is run up to where its run begins.

    Raises:
        ConfigError, CheckpointError: as `read_trained`.
        ValueError: the function cannot be imported, or makes another model.
    """
    functions = Functions(model) if model else None
    trained = read_trained(user_path(run_folder), step=step, functions=functions)
    state = trained.state_dict()
    whole = trained.config.model.module_for(state)
    try:
        whole.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{trained.folder}: was trained with another model: {error}") from error
    return whole.eval()


def save_safetensors(trained: Trained, file: Path) -> None:
    """Write the whole state dict to a file, as `load_state_dict` of the whole model takes it.

    Raises:
        ConfigError: the file exists, or has another ending.
    """
    if file.suffix != ".safetensors":
        raise ConfigError(f"{file}: name a file that ends in .safetensors")
    if file.exists():
        raise ConfigError(f"{file}: exists already; name a new file")
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in trained.state_dict().items()}
    partial = file.with_name(f".{file.name}.partial")
    facts = {"format": "pt", "run": trained.config.run.name, "step": str(trained.step)}
    try:
        save_file(tensors, partial, metadata=facts)
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def start_from_run(built: Built, config: RunConfig) -> str | None:
    """Give this rank's stages the weights of `model.from_run`; return a note, if it is set.

    Optimizer, learning rate and activation cache start from scratch.

    Raises:
        ConfigError, CheckpointError: as `read_trained`, or it trained another model.
    """
    source = source_of(config)
    if source is None:
        return None
    trained, own_rows = read_trained(source), rows_of(built.engine.transport.mesh)
    _check_kinds(config, trained, source)
    for stage in built.stages:
        try:
            load_module(
                module_of(stage), trained.tensors, trained.folder, own_rows, base=trained.base
            )
        except RuntimeError as error:
            raise CheckpointError(
                f"model.from_run = {source}: trained a model of other sizes: {error}"
            ) from error
    return f"weights of step {trained.step} of {source}; everything else starts from scratch"


def _check_kinds(config: RunConfig, trained: Trained, source: Path) -> None:
    if config.model.is_frozen != trained.config.model.is_frozen:
        which = "this run" if config.model.is_frozen else "that one"
        raise CheckpointError(
            f"model.from_run = {source}: only {which} has adapters (model.lora); `thinpipe export` "
            "that run, which merges what it has, and name the folder in model.pretrained"
        )
    if config.model.tie_embeddings != "exact":
        return
    for name, tied_to in config.model.tied_names.items():
        ends = [trained.tensors[n] for n in (name, tied_to) if n in trained.tensors]
        if len(ends) == 2 and not torch.equal(*ends):
            raise CheckpointError(
                f'model.tie_embeddings = "exact": {tied_to} and {name} of {trained.folder} were '
                'trained as separate weights and differ; use tie_embeddings = "untied"'
            )
