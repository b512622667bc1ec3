"""Where a Hugging Face model family has its blocks, and what only its first and last stage need.

A family's own forward runs on every stage, with some modules replaced: hidden states enter as
`inputs_embeds`, so that masks, positions and rotary tables are made on each stage. To add a family:

    "gpt2": Family(
        "h",                                              # its list of blocks
        first={"wte": "identity", "wpe": "zero", "drop": "identity"},  # on the first stage only
        last={"ln_f": "identity"},                          # on the last stage only
    ),

Paths start at the base model. `check_passes_through` refuses a family whose other modules change
hidden states too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Substitute = Literal["identity", "none", "zero", "inputs"]
"""What replaces a module on the other stages: the identity; None, if it is optional; a position
embedding of zero; an embedding block that returns `inputs_embeds`."""


@dataclass(frozen=True)
class Family:
    """Paths from the base model. `shared` modules are used by every stage; `task` is the head's."""

    blocks: str
    first: Mapping[str, Substitute] = field(default_factory=dict)
    last: Mapping[str, Substitute] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    task: Literal["language", "classification"] = "language"


_GPT2 = Family("h", {"wte": "identity", "wpe": "zero", "drop": "identity"}, {"ln_f": "identity"})
_BERT = Family("encoder.layer", {"embeddings": "inputs"}, {"pooler": "none"}, task="classification")

_FAMILIES = {
    "gpt2": _GPT2,
    "gpt_neo": _GPT2,
    "gptj": Family("h", {"wte": "identity", "drop": "identity"}, {"ln_f": "identity"}),
    "opt": Family(
        "decoder.layers",
        {
            "decoder.embed_tokens": "identity",
            "decoder.embed_positions": "zero",
            "decoder.project_in": "none",
        },
        {"decoder.final_layer_norm": "none", "decoder.project_out": "none"},
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "deberta-v2": Family(
        "encoder.layer",
        {"embeddings": "inputs", "encoder.conv": "none"},
        shared=("encoder.rel_embeddings", "encoder.LayerNorm"),
        task="classification",
    ),
}

_REMEDY = (
    "train one of {known}, or a family with a base_model_pp_plan (Llama and its relatives), or "
    "add its blocks, first and last modules to pipeline/models/hf/families.py (five lines)"
)


def family_of(config: Any) -> Family:
    """The family of a transformers config: from the table, or from the plan in its own class.

    Raises:
        ValueError: neither knows it.
    """
    if config.model_type in _FAMILIES:
        return _FAMILIES[config.model_type]
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    blocks = next((name for name in plan if name in ("layers", "h")), None)
    if blocks is None:
        raise ValueError(
            f"model_type = {config.model_type!r}: its blocks and ends are listed neither here "
            f"nor in its transformers config (base_model_pp_plan); {_remedy()}"
        )
    at = plan.index(blocks)
    return Family(
        blocks,
        first={name: "identity" for name in plan[:at]},
        last={name: "identity" for name in plan[at + 1 :]},
    )


class IndexedBlocks(nn.ModuleList):
    """Some of a model's blocks under their indices in it; positions count from the first kept."""

    def __init__(self, blocks: nn.ModuleList, first: int, stop: int) -> None:
        super().__init__()
        for index in range(first, stop):
            self.add_module(str(index), blocks[index])

    def __getitem__(self, position: Any) -> Any:
        """The block or blocks at a position, not at an index of the whole model."""
        blocks = list(self._modules.values())
        return nn.ModuleList(blocks[position]) if isinstance(position, slice) else blocks[position]


def replace_modules(base: nn.Module, substitutes: Mapping[str, Substitute]) -> None:
    """Replace modules of a base model, where it has them."""
    for path, substitute in substitutes.items():
        parent, _, name = path.rpartition(".")
        owner = base.get_submodule(parent)
        if getattr(owner, name, None) is not None:
            setattr(owner, name, _SUBSTITUTES[substitute]())


@torch.no_grad()
def check_passes_through(model: Any, *, width: int) -> None:
    """Refuse a base model that changes hidden states even without its blocks and ends.

    Some families scale embeddings in their forward, or add something at every call: when cut, they
    would silently compute something else.

    Raises:
        ValueError: the hidden states differ, or the family's forward cannot run without blocks.
    """
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(1, 3, width, generator=generator)
    reason = "it changes hidden states outside its blocks"
    try:
        out_BTD = model(inputs_embeds=x_BTD, use_cache=False, return_dict=True).last_hidden_state
        same = torch.equal(out_BTD, x_BTD)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        same, reason = False, f"its forward fails without blocks ({error})"
    if not same:
        raise ValueError(
            f"model_type = {model.config.model_type!r} cannot be cut by its base_model_pp_plan: "
            f"{reason}; {_remedy()}"
        )


def in_table(model_type: str) -> bool:
    """Whether the family is listed (and tested) here."""
    return model_type in _FAMILIES


def _remedy() -> str:
    return _REMEDY.format(known=", ".join(_FAMILIES))


class _ZeroPositions(nn.Module):
    def forward(self, *arguments: Any, **settings: Any) -> Tensor:
        device = next((a.device for a in arguments if isinstance(a, Tensor)), None)
        return torch.zeros((), device=device)


class _InputsAsEmbeddings(nn.Module):
    def forward(self, *arguments: Any, inputs_embeds: Tensor, **settings: Any) -> Tensor:
        return inputs_embeds


_SUBSTITUTES: dict[Substitute, Any] = {
    "identity": nn.Identity,
    "none": lambda: None,
    "zero": _ZeroPositions,
    "inputs": _InputsAsEmbeddings,
}
