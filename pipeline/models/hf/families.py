"""Where a Hugging Face model family has its blocks, and what only its first and last stage need.

A family's own forward runs on every stage, with some modules replaced: hidden states enter as
`inputs_embeds`, so that masks, positions and rotary tables are made on each stage. `discovery.py`
finds out by trying; GPT-2's blocks are "h", its first stage alone needs {"wte": "identity", "wpe":
"zero", "drop": "identity"}, and its last one {"ln_f": "identity"}.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Substitute = Literal["identity", "none", "zero", "inputs"]
"""What replaces a module on the other stages: the identity; None, if it is optional; a position
embedding of zero; an embedding block that returns `inputs_embeds`."""
Task = Literal["language", "classification"]


@dataclass(frozen=True)
class Family:
    """Paths from the base model: of its list of blocks, of what the first and the last stage alone
    need, and of what all use.
    """

    blocks: str
    first: Mapping[str, Substitute] = field(default_factory=dict)
    last: Mapping[str, Substitute] = field(default_factory=dict)
    shared: tuple[str, ...] = ()


# Its convolution stands between two blocks, and its shared parts are read, not called.
_DEBERTA = Family(
    "encoder.layer",
    {"embeddings": "inputs", "encoder.conv": "none"},
    shared=("encoder.rel_embeddings", "encoder.LayerNorm"),
)
KNOWN = {"deberta-v2": _DEBERTA}
"""By model_type, families of which trying cannot tell."""


def task_of(config: Any) -> Task:
    """Task of a model of this transformers config: encoders classify.

    Raises:
        ValueError: it has both an encoder and a decoder, or more than text goes into it.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model_type = {kind!r} is an encoder-decoder: its decoder needs the encoder's output "
            "in every block, so that more than hidden states would cross a cut; train a decoder "
            "(GPT-2, Llama and their relatives) or an encoder (BERT and its relatives)"
        )
    encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if encoder and not getattr(config, "is_decoder", False):
        known = kind in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        task: Task = "classification"
    else:
        known, task = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "language"
    if not known or not all(hasattr(config, name) for name in ("num_hidden_layers", "vocab_size")):
        raise ValueError(
            f"model_type = {kind!r}: is neither a causal language model nor a text encoder with a "
            "classification head; use one, for example the text part of a multimodal model"
        )
    return task


def check_router(config: Any) -> None:
    """Reject a loss that the model asks for and the pipeline would not compute."""
    names = ("router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")
    rates = {name: getattr(config, name, None) or 0.0 for name in names}
    asked = {name: rate for name, rate in rates.items() if rate > 0}
    if getattr(config, "output_router_logits", False) and asked:
        name, rate = next(iter(asked.items()))
        raise ValueError(
            f"output_router_logits = true, {name} = {rate}: the routers' balancing loss runs over "
            "all layers, of which a stage has only its own, so it is not computed; set "
            "output_router_logits = false in config.json to train without it"
        )


class IndexedBlocks(nn.ModuleList):
    """Some of a model's blocks under their indices in it; positions count from the first kept."""

    def __init__(self, blocks: nn.ModuleList, first: int, stop: int) -> None:
        super().__init__()
        for index in range(first, stop):
            self.add_module(str(index), blocks[index])

    def __getitem__(self, position: Any) -> Any:
        blocks = list(self._modules.values())
        return nn.ModuleList(blocks[position]) if isinstance(position, slice) else blocks[position]


def keep_blocks(base: Any, family: Family, first: int, stop: int) -> None:
    """Leave only blocks `first` to `stop - 1` in a base model."""
    blocks = base.get_submodule(family.blocks)
    base.set_submodule(family.blocks, IndexedBlocks(blocks, first, stop))
    kinds = getattr(base.config, "layer_types", None)  # kinds of masks, looked up by position
    if kinds and len(kinds) == len(blocks) > stop - first:
        base.config.layer_types = kinds[first:stop]


def replace_modules(base: nn.Module, substitutes: Mapping[str, Substitute]) -> None:
    """Replace modules of a base model, where it has them."""
    for path, substitute in substitutes.items():
        parent, _, name = path.rpartition(".")
        owner = base.get_submodule(parent)
        if getattr(owner, name, None) is not None:
            setattr(owner, name, _SUBSTITUTES[substitute]())


class _ZeroPositions(nn.Module):
    def forward(self, *arguments: Any, **settings: Any) -> Tensor:
        device = next((a.device for a in arguments if isinstance(a, Tensor)), None)
        return torch.zeros((), device=device)


class _InputsAsEmbeddings(nn.Module):
    def forward(
        self, *arguments: Any, inputs_embeds: Tensor | None = None, **settings: Any
    ) -> Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        given = (a for a in arguments if isinstance(a, Tensor) and a.is_floating_point())
        return next(given)


_SUBSTITUTES: dict[Substitute, Any] = {
    "identity": nn.Identity,
    "none": lambda: None,
    "zero": _ZeroPositions,
    "inputs": _InputsAsEmbeddings,
}
