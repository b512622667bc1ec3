"""Where the parts of a Hugging Face model family are: its blocks, and what only its ends hold.

A family's own forward runs on every stage, with parts taken out: hidden states enter as
`inputs_embeds`, so that masks, positions and rotary tables are made on each stage. To add a family:

    "gpt2": Family(
        "h",                                              # its list of blocks
        first={"wte": "absent", "wpe": "zero", "drop": "absent"},  # on the first stage only
        last={"ln_f": "absent"},                          # on the last stage only
    ),

Paths start at the base model. `check_passes_through` refuses a family whose remaining parts still
change the hidden states that they are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Substitute = Literal["absent", "none", "zero", "inputs"]
"""What stands in for a part on the other stages: a module that passes on its input; None, for
optional parts; a position embedding of zero; an embedding block that passes on `inputs_embeds`."""


@dataclass(frozen=True)
class Family:
    """Paths from the base model. `shared` parts are used by every stage; `task` is the head's."""

    blocks: str
    first: Mapping[str, Substitute] = field(default_factory=dict)
    last: Mapping[str, Substitute] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    task: Literal["language", "classification"] = "language"


_GPT2 = Family("h", {"wte": "absent", "wpe": "zero", "drop": "absent"}, {"ln_f": "absent"})
_BERT = Family("encoder.layer", {"embeddings": "inputs"}, {"pooler": "none"}, task="classification")

_FAMILIES = {
    "gpt2": _GPT2,
    "gpt_neo": _GPT2,
    "gptj": Family("h", {"wte": "absent", "drop": "absent"}, {"ln_f": "absent"}),
    "opt": Family(
        "decoder.layers",
        {
            "decoder.embed_tokens": "absent",
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
    "add its blocks, first and last parts to pipeline/models/hf/families.py (five lines)"
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
            f"model_type = {config.model_type!r}: where its blocks and its ends are is not known, "
            f"neither here nor in its transformers config (base_model_pp_plan); {_remedy()}"
        )
    place = plan.index(blocks)
    return Family(
        blocks,
        first={name: "absent" for name in plan[:place]},
        last={name: "absent" for name in plan[place + 1 :]},
    )


class IndexedBlocks(nn.ModuleList):
    """Some of a model's blocks under their indices in it; positions count from the first kept."""

    def __init__(self, blocks: nn.ModuleList, first: int, stop: int) -> None:
        super().__init__()
        for index in range(first, stop):
            self.add_module(str(index), blocks[index])

    def __getitem__(self, place: Any) -> Any:
        """The block or blocks at a position, not at an index of the whole model."""
        blocks = list(self._modules.values())
        return nn.ModuleList(blocks[place]) if isinstance(place, slice) else blocks[place]


def take_out(base: nn.Module, parts: Mapping[str, Substitute]) -> None:
    """Replace parts of a base model; optional parts that it lacks stay absent."""
    for path, substitute in parts.items():
        parent, _, name = path.rpartition(".")
        owner = base.get_submodule(parent)
        if getattr(owner, name, None) is not None:
            setattr(owner, name, _SUBSTITUTES[substitute]())


@torch.no_grad()
def check_passes_through(model: Any, *, width: int) -> None:
    """Refuse a base model that has lost its blocks and ends and still changes hidden states.

    Some families scale embeddings in their forward, or add something at every call: cut, they
    would compute something else without a word.

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
    """Whether the family's cut is written down (and tested) here."""
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


class _Absent(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD


_SUBSTITUTES: dict[Substitute, Any] = {
    "absent": _Absent,
    "none": lambda: None,
    "zero": _ZeroPositions,
    "inputs": _InputsAsEmbeddings,
}
