"""Export of a LoRA run as an adapter folder that `peft` loads onto the base model."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from thinpipe.launch.config.run import load_run
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.trained.export_hf import (
    DTYPES,
    ExportDtype,
    check_folders,
    fitting,
    new_folder,
)
from thinpipe.launch.trained.model import Trained, read_trained
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.lora import ADAPTER, peft_config

WEIGHTS = "adapter_model.safetensors"


def export_adapter(
    run_folder: Path, out: Path, *, step: int | None, dtype: ExportDtype
) -> list[str]:
    """Write the adapters of a checkpoint to the folder `out`; return notes.

    What else the checkpoint holds, such as a classification head, goes along (`modules_to_save`).
    `dtype = "source"` is that of training, fp32.

    Raises:
        ConfigError: the run has no adapters, or no base in files; `out` is not empty, or a weight
            overflows `dtype`.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    check_folders(run_folder, out)
    config = load_run(run_folder)
    model = config.model
    if not isinstance(model, HuggingFaceConfig) or not model.reads_frozen:
        raise ConfigError(
            f"{run_folder}: its model is not trained with model.lora from model.pretrained, so "
            "there is no adapter; export it with --format hf or safetensors"
        )
    trained = read_trained(run_folder, step=step)
    with new_folder(out) as folder:
        _write(model, trained, folder, dtype)
    notes = [f"step {trained.step} of {run_folder}, an adapter of {model.folder}"]
    if model.classes is not None:
        notes.append(f"load the base model with num_labels = {model.classes}")
    return notes


def _write(model: HuggingFaceConfig, trained: Trained, folder: Path, dtype: ExportDtype) -> None:
    """Adapters, and whole modules with them."""
    assert model.lora is not None, "there are adapters"
    whole, tensors = model.whole(), model.whole_names(trained.tensors)
    base = whole.base_model_prefix
    others = {_module(name, base) for name in tensors if f".{ADAPTER}." not in name}
    options = peft_config(whole, model.lora)
    options.base_model_name_or_path = str(model.folder)
    options.task_type = "CAUSAL_LM" if model.classes is None else "SEQ_CLS"
    options.modules_to_save = sorted(others) or None
    options.inference_mode = True
    options.save_pretrained(str(folder))
    wide = DTYPES.get(dtype, torch.float32)
    renamed = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": fitting(tensor, wide, name).clone(
            memory_format=torch.contiguous_format
        )
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # safetensors: for the owner only


def _module(name: str, base: str) -> str:
    """The module of a parameter: a head as a whole, of the base model the innermost one."""
    first = name.partition(".")[0]
    return name.rpartition(".")[0] if first == base else first
