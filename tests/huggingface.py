"""Tiny models of every family, saved as a user would have them on disk."""

import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

LAYERS, VOCAB, CLASSES = 6, 256, 3
# fmt: off
_LLAMA = {
    "num_hidden_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": VOCAB,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_GPT2 = {
    "n_layer": LAYERS, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32,
    "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_OPT = {**_LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0}
_BERT = {**_LLAMA, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_DEBERTA = {
    **_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3,
    "position_biased_input": False, "norm_rel_ebd": "layer_norm", "position_buckets": 8,
}
_LOCAL = {"sliding_window": 4}
_NEO = {
    **_LLAMA, "num_layers": LAYERS, "num_heads": 4, "window_size": 4,
    "attention_types": [[["global", "local"], LAYERS // 2]],
}
del _NEO["num_hidden_layers"], _NEO["num_attention_heads"]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-inverse": ("gpt2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "gpt-neo": ("gpt_neo", _NEO),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}),
    "gpt-neox": ("gpt_neox", _LLAMA),
    "llama": ("llama", _LLAMA),
    "llama-tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**_LLAMA, **_LOCAL}),
    "qwen2": ("qwen2", {**_LLAMA, **_LOCAL, "use_sliding_window": True, "max_window_layers": 3}),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 8}),
    "phi": ("phi", _LLAMA),
    "phi3": ("phi3", _LLAMA),
    "gemma": ("gemma", {**_LLAMA, "head_dim": 8}),
    "gemma2": ("gemma2", {**_LLAMA, **_LOCAL, "head_dim": 8}),
    "gemma3": ("gemma3_text", {**_LLAMA, **_LOCAL, "head_dim": 8}),
    "olmo": ("olmo", _LLAMA),
    "olmo2": ("olmo2", _LLAMA),
    "bert": ("bert", _BERT),
    "roberta": ("roberta", {**_BERT, "pad_token_id": 1, "max_position_embeddings": 34}),
    "deberta": ("deberta-v2", _DEBERTA),
}
_MOE = {
    **_LLAMA, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}
_DEEPSEEK = {
    **_MOE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 2,
}
_NEXT = {
    **_MOE, "head_dim": 8, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
# Families that are in no list: how they are cut is found by trying.
TRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {**_GPT2, "hidden_size": 32}),
    "falcon": ("falcon", {**_LLAMA, "multi_query": True}),
    "gpt-bigcode": ("gpt_bigcode", _GPT2),
    "mpt": ("mpt", {**_GPT2, "n_layers": LAYERS, "d_model": 32, "n_heads": 4}),
    "nemotron": ("nemotron", {**_LLAMA, "head_dim": 8}),
    "stablelm": ("stablelm", _LLAMA),
    "apertus": ("apertus", _LLAMA),
    "mixtral": ("mixtral", _MOE),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "head_dim": 8}),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK),
    "qwen3-next": ("qwen3_next", _NEXT),
    "qwen3.5-moe": ("qwen3_5_moe_text", _NEXT),
    "electra": ("electra", {**_BERT, "embedding_size": 16}),
    "modernbert": ("modernbert", {**_LLAMA, "local_attention": 4}),
    "modernbert-decoder": ("modernbert-decoder", {**_LLAMA, "local_attention": 4}),
    "xlm-roberta": ("xlm-roberta", {**_BERT, "pad_token_id": 1, "max_position_embeddings": 34}),
}
# fmt: on
ENCODERS = ("bert", "roberta", "deberta", "electra", "modernbert", "xlm-roberta")


def settings(name: str, **changes: Any) -> Any:
    """The transformers config of a tiny model."""
    from transformers import AutoConfig

    kind, values = {**MODELS, **TRIED}[name]
    config = AutoConfig.for_model(kind, **{**values, **changes})
    if name in ENCODERS:
        config.num_labels = changes.get("num_labels", CLASSES)
    return config


def saved_model(name: str, folder: Path, **changes: Any) -> Any:
    """A model with random weights, also saved to `folder` in small shards."""
    model, source = _made(name, json.dumps(changes))
    shutil.copytree(source.name, folder, dirs_exist_ok=True)
    return copy.deepcopy(model)


@functools.cache
def _made(name: str, changed: str) -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    """A model and its folder, made once in each process.

    It computes without a cache, as stages do: a cache changes the layout of keys, and on some
    processors their products in the last bit.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    changes, folder = json.loads(changed), tempfile.TemporaryDirectory()
    factory: Any = AutoModelForSequenceClassification if name in ENCODERS else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = factory.from_config(settings(name, **changes))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases start at 0 and norms at 1, which would hide mix-ups
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder.name, max_shard_size="20KB")
    model.config.use_cache = False
    return model.eval(), folder


def section(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """The [model] section of a run with a model that `saved_model` saves if none is there yet."""
    if not (folder / "config.json").exists():
        saved_model(name, folder)
    encoder = {"task": "classification", "classes": CLASSES} if name in ENCODERS else {}
    return {"pretrained": str(folder), **encoder, **more}
