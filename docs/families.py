"""Tries every text family of transformers at a small size, and writes the table of families.

    python docs/families.py [FAMILY ...]     # all of them: about 4 minutes, 4 GB; or these rows

A family is bit-equal if logits and gradients of one step, cut in three stages, equal those of the
whole model; byte-equal if weights that were read come back to disk as they were.
"""

import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto as auto

from thinpipe.launch.trained.export_hf import WholeModel
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.families import task_of
from thinpipe.pipeline.models.hf.self_check import check_step
from thinpipe.pipeline.models.hf.stage import build_stage

PAGE = Path(__file__).parent / "generated" / "families.md"
LAYERS, CLASSES, MOST_PARAMETERS = 6, 3, 2e7
_DEPTH = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS)
_WIDTH = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32)
_HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
_INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48)
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SMALL: Mapping[str, Any] = {
    **_DEPTH,
    **_WIDTH,
    **_HEADS,
    **_INNER,
    **_EXPERTS,
    **_RANKS,
    **_LINEAR,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "v_head_dim": 8,
    "head_dim": 8,
    "rotary_dim": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What some families' configs want otherwise.
_VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": 4},
    {"num_experts_per_tok": 1},
    {"n_layer": None, "num_layers": None, "num_hidden_layers": None},
)


def main(kinds: list[str]) -> None:
    """Try the families, and write their rows of the page."""
    known = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = {} if not kinds else _rows()
    for kind in kinds or sorted(known):
        step, disk, reason = _try(kind)
        print(f"{kind:28} {step:10} {disk:11} {reason}", flush=True)
        rows[kind] = f"| {kind} | {step} | {disk} | {reason} |"
    PAGE.write_text(_page([rows[kind] for kind in sorted(rows)]), encoding="utf-8")


def _rows() -> dict[str, str]:
    """Rows of the page as it is, by family."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("|---|---|---|---|") + 1 :]
    return {line.split("|")[1].strip(): line for line in table if line}


def _page(rows: list[str]) -> str:
    equal = sum("| bit-equal |" in row for row in rows)
    same = sum("| byte-equal |" in row for row in rows)
    return "\n".join(
        [
            "# Hugging Face families\n",
            f"Written by `python docs/families.py` with transformers {transformers.__version__}, "
            f"torch {torch.__version__}: {equal} of {len(rows)} families are cut bit for bit, "
            f"{same} come back to disk byte for byte. Tried on random weights, {LAYERS} layers, "
            "on a CPU. `rejected`: before training, with this reason.\n",
            "| model_type | a step, cut | weights, read and exported | |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _try(kind: str) -> tuple[str, str, str]:
    """Results with the first small config that its own forward runs with."""
    problem = ""
    for variant in _VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                head = _save_small_config(kind, variant, folder)
                config = HuggingFaceConfig.model_validate({"config": folder, **head})
                if sum(p.numel() for p in config.whole().parameters()) > MOST_PARAMETERS:
                    problem = problem or "too large"
                    continue
                _ = config.family
            except ValueError as error:
                return "rejected", "", _short(error, folder)
            except Exception as error:  # sizes that do not go together
                problem = problem or _short(error, folder)
                continue
            try:
                check_step(config, seed=0)
            except ValueError as error:
                return "differs", "", _short(error, folder)
            except Exception as error:
                problem = problem or _short(error, folder)
                continue
            return "bit-equal", *_through_disk(config, head, Path(folder))
    return "not tried", "", f"no small config is known here ({problem})"


def _through_disk(config: HuggingFaceConfig, head: Any, folder: Path) -> tuple[str, str]:
    """Save as the library does, read as a run does, and write again."""
    try:
        whole = build_stage(config, 0, config.layers, seed=0, device="cpu").model
        (folder / "source").mkdir()
        whole.save_pretrained(folder / "source")
        read = HuggingFaceConfig.model_validate({"pretrained": str(folder / "source"), **head})
        model = build_stage(read, 0, read.layers, seed=1, device="cpu").model
        (folder / "out").mkdir()
        WholeModel(read, model.state_dict(), "source").write(folder / "out")
    except Exception as error:
        return "fails", _short(error, str(folder))
    before, after = (load_file(folder / n / "model.safetensors") for n in ("source", "out"))
    same = before.keys() == after.keys() and all(
        torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8))
        if before[n].ndim
        else torch.equal(before[n], after[n])
        for n in before
    )
    return "byte-equal" if same else "differs", ""


def _save_small_config(kind: str, variant: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Save a small config; return what the [model] section needs beside it.

    Raises:
        ValueError: no model of this kind is trained here.
        RuntimeError: the config refuses its sizes.
    """
    whole = transformers.AutoConfig.for_model(kind)
    task = task_of(whole)
    aliases = whole.attribute_map or {}
    names = {*whole.to_dict(), *aliases}
    small = {
        name: variant.get(name, value)
        for name, value in _SMALL.items()
        if name in names and aliases.get(name) not in _SMALL
    }
    given = {name: value for name, value in small.items() if value is not None}
    try:
        transformers.AutoConfig.for_model(kind, **given).save_pretrained(folder)
    except Exception as error:
        raise RuntimeError(str(error)) from error
    return {"task": task, "classes": CLASSES} if task == "classification" else {}


def _short(error: Exception, folder: str) -> str:
    text = str(error).replace(f"{folder}/config.json: ", "").split("; ")[0].strip()
    lines = [line for line in text.splitlines() if "validator" not in line]
    text = (lines or [type(error).__name__])[-1].strip().replace("|", "/")
    _, _, rest = text.partition("cannot be cut: ")
    return (rest or text)[:150]


if __name__ == "__main__":
    main(sys.argv[1:])
