"""LoRA: low-rank additions to the linear layers of a stage, by peft.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022 (arXiv 2106.09685),
section 4.1: W0 + (alpha / r) B A, with A random and B zero at the start.

Axes: O outputs, I inputs, R rank.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.pipeline.models.hf.config import LoraConfig
from thinpipe.pipeline.models.hf.init import seeded

# peft imports it where it is installed; it tells those with AVX-512 to install more kernels.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

ADAPTER = "default"
"""peft's own name for the only one."""


def add_lora(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Add adapters to the blocks in place and freeze the rest except task heads.

    Their random values depend on the seed and their names.

    Raises:
        ImportError: peft is not installed.
        ValueError: a target names no linear layer, or there is no default for the family.
    """
    from peft import inject_adapter_in_model

    targets, heads = config.targets or default_targets(model), trained_heads(model)
    options = peft_config(model, config)
    with torch.random.fork_rng(devices=[]):
        try:
            inject_adapter_in_model(options, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise _no_such_target(model, targets, targets) from error
    for name, module in model.named_modules():
        if hasattr(module, "reset_lora_parameters"):
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()  # peft takes the frozen weight's dtype
            with seeded(seed, f"{name}.lora"):
                module.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    for name in heads:
        model.get_submodule(name).requires_grad_(True)


def peft_config(model: Any, config: LoraConfig) -> Any:
    """The settings as peft has them, for this model; a new object."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets or default_targets(model)),
        exclude_modules=_heads(model),
        fan_in_fan_out=stores_inputs_first(model),
    )


def check_targets(model: Any, config: LoraConfig) -> None:
    """Check that every target is there; `model` is whole, as a stage's blocks may lack some.

    Raises:
        ValueError: a target names no linear layer of a block, or none has such a rank.
    """
    names, targets = _linear_layers(model), config.targets or ()
    chosen = {t: [name for name in names if f".{name}".endswith(f".{t}")] for t in targets}
    missing = [target for target, found in chosen.items() if not found]
    if missing:
        raise _no_such_target(model, targets, missing)
    if targets:
        names = [name for found in chosen.values() for name in found]
    most = max((min(model.get_submodule(name).weight.shape) for name in names), default=0)
    if config.rank > most > 0:
        raise ValueError(
            f"model.lora.rank = {config.rank}: no linear layer that it is added to has a rank "
            f"above {most}; use fewer, as in rank = {min(8, most)}"
        )


def _no_such_target(model: Any, targets: Sequence[str], missing: Sequence[str]) -> ValueError:
    return ValueError(
        f"model.lora.targets = {list(targets)}: no linear layers of a block: {list(missing)}; "
        f"use some of {_available(model)}"
    )


def _available(model: Any) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in _linear_layers(model)))


def _linear_layers(model: Any) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.partition(".")[0] not in _heads(model)
    ]


def _heads(model: Any) -> list[str]:
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def trained_heads(model: Any) -> list[str]:
    """Modules besides the base model that are trained with its adapters."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return []
    return _heads(model)


def stores_inputs_first(model: Any) -> bool:
    """Whether the linear layers of the blocks are stored [I, O], as GPT-2's are."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def merge_lora(
    tensors: Mapping[str, Tensor], config: LoraConfig, *, inputs_first: bool
) -> dict[str, Tensor]:
    """Weights without adapters: W0 + (alpha / r) B A, under the names of the plain model.

    With `inputs_first` weights are stored [I, O], as GPT-2's are. A layer that was not trained
    keeps its bytes.
    """
    merged = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        module, dot, kind = name.rpartition(".base_layer.")
        if dot and kind == "weight":
            a_RI = tensors[f"{module}.lora_A.{ADAPTER}.weight"]
            b_OR = tensors[f"{module}.lora_B.{ADAPTER}.weight"]
            if b_OR.any():
                change_OI = (b_OR.double() @ a_RI.double()) * (config.alpha / config.rank)
                change = change_OI.T if inputs_first else change_OI
                tensor = (tensor.double() + change).to(tensor.dtype)
        merged[f"{module}.{kind}" if dot else name] = tensor
    return merged


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


# Names of the attention's inputs, for families that peft has no default for.
_ATTENTION = (
    *(("q_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("Wqkv",), ("c_attn",)),
    *(("query", "value"), ("q_lin", "v_lin")),
)


def default_targets(model: Any) -> list[str]:
    """The layers to adapt: peft's for the family, or the attention's inputs.

    Raises:
        ValueError: there is no default, and the attention has other names.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    targets = DEFAULTS.get(model.config.model_type)
    if targets is None:
        held = {name.rpartition(".")[2] for name in _linear_layers(model)}
        targets = next((names for names in _ATTENTION if held.issuperset(names)), None)
    if targets is None:
        raise ValueError(
            f"model.lora.targets: there is no default for {model.config.model_type}; name some of "
            f"its linear layers: {_available(model)}"
        )
    return list(targets)
