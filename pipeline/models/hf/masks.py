"""Packed examples and prefixes for models of the transformers library.

A family's forward makes a mask from padding and counts positions from 0. It passes on a mask of
four dimensions as it is, and takes positions, so both are made here, as for our own model. A family
is listed once `tests/pipeline/models/hf/test_masks.py` shows that an example in a pack gets the
logits it has alone; of any other the self-check tries that (`self_check.py`).

Axes: B samples, T tokens, Q query tokens, K key tokens.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.attention import attention_mask, positions
from thinpipe.pipeline.models.hf.families import task_of

_FAMILIES = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "olmo"),
    *("olmo2", "opt", "phi", "phi3", "qwen2", "qwen3"),
)
_REMEDY = 'use packing = false and objective = "causal"'


def takes_types(model: Any) -> bool:
    """Whether a family tells types of tokens apart, such as the texts of a pair."""
    types = getattr(model.config, "type_vocab_size", None) or 1
    return types > 1 and "token_type_ids" in inspect.signature(model.base_model.forward).parameters


def check_masks(config: Any, tokens: int, *, tried: bool = False) -> None:
    """Check that sequences of so many tokens may be packed and have prefixes.

    `tried` says that the self-check is on, which tries families that are not listed.

    Raises:
        ValueError: the family (of this transformers config) cannot, or not in such long sequences.
    """
    reason = _rejection(config)
    if reason is not None:
        raise ValueError(
            f"model_type = {config.model_type!r}: {reason}, so packed examples and prefixes are "
            f"not supported; {_REMEDY}, or a model of {', '.join(_FAMILIES)}"
        )
    if config.model_type not in _FAMILIES and not tried:
        raise ValueError(
            f"model_type = {config.model_type!r}: it has not been tested with masks and positions "
            f"of ours; set model.self_check = true, which tries it before training, or {_REMEDY}"
        )
    for setting, most in _limits(config).items():
        if tokens > most:
            raise ValueError(
                f"model_type = {config.model_type!r}, {setting} = {most}: sequences of {tokens} "
                "tokens are longer, and packed examples and prefixes are not supported there; "
                f"use a sequence_length of at most {most}, or {_REMEDY}"
            )


def mask_inputs(
    samples: Samples, tokens: int, *, attention: str, device: torch.device
) -> dict[str, Tensor]:
    """Arguments of a family's forward for packed examples or prefixes.

    `attention` is the model's kind of attention, "eager" or "sdpa".

    Raises:
        ValueError: another kind; its kernels take no mask of ours.
    """
    mask_B1QK = attention_mask(samples, tokens, causal=True, device=device)
    assert mask_B1QK is not None, "there are segments or prefixes"
    if attention == "eager":  # adds the mask to its scores
        least = torch.finfo(torch.float32).min
        mask_B1QK = torch.zeros(mask_B1QK.shape, device=device).masked_fill(~mask_B1QK, least)
    elif attention != "sdpa":
        raise ValueError(
            f"attn_implementation = {attention!r}: it takes no masks of packed examples and "
            f'prefixes; use "sdpa" or "eager" in config.json, or {_REMEDY}'
        )
    positions_BT = positions(samples, tokens, device=device).expand(len(samples.ids_B), tokens)
    return {"attention_mask": mask_B1QK, "position_ids": positions_BT}


def _rejection(config: Any) -> str | None:
    if task_of(config) == "classification":
        return "it is an encoder, which reads one text at a time"
    if config.model_type == "gpt_neo":
        return "its blocks add causal and local masks of their own"
    if getattr(config, "use_bidirectional_attention", False):
        return "with use_bidirectional_attention it is no causal model"
    return None


def _limits(config: Any) -> dict[str, int]:
    """Longest sequences in which no block needs a mask, or an example a position, of its own."""
    found = {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_attention" in kinds:
        found["sliding_window"] = int(window)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # the longest example of a batch decides the rotation
        found["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return found
