"""Low-rank additions to a model from its folder, trained on dicts as transformers has them.

thinpipe run examples/programs/hf_lora.py FOLDER
"""

import sys

import torch
from transformers import AutoTokenizer

import thinpipe as tp

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
facts = {"the sky": "blue", "the grass": "green", "the snow": "white", "the night": "black"}


def collate(items: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Loss on the answers alone; labels stand at their own tokens, as in transformers."""
    rows = []
    for subject, color in items:
        prompt = tokenizer(subject, add_special_tokens=False)["input_ids"]
        answer = tokenizer(color, add_special_tokens=False)["input_ids"]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    longest = max(len(ids) for ids, _ in rows)
    missing = [longest - len(ids) for ids, _ in rows]
    pad = tokenizer.pad_token_id or 0
    rows = list(zip(rows, missing, strict=True))
    return {
        "input_ids": torch.tensor([ids + [pad] * n for (ids, _), n in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for (ids, _), n in rows]),
        "labels": torch.tensor([labels + [-100] * n for (_, labels), n in rows]),
    }


boundary = tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8))
pipe = tp.Pipeline.from_pretrained(folder, lora={"rank": 4}, cuts=[1], boundary=boundary)
run = tp.Run("runs/hf_lora", pipe, torch.optim.AdamW(pipe.parameters(), 1e-2))
for _ in run.epochs(3):
    for batch in run.batches(list(facts.items()) * 4, size=8, collate=collate, longest=16):
        run.step(batch)
