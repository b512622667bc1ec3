"""A classifier of texts: an encoder from its folder, and GLUE's metrics.

thinpipe run examples/programs/classification.py FOLDER
"""

import sys
from typing import Any

import torch
from transformers import AutoTokenizer

import thinpipe as tp

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
good, bad = ("fine", "lovely", "warm", "kind"), ("poor", "dull", "cold", "rude")
texts = [
    (f"the {what} was {word}", int(word in good))
    for what in ("film", "room", "host", "soup")
    for word in (*good, *bad)
]


def collate(items: list[tuple[str, int]]) -> dict[str, Any]:
    """Padded to the longest of the batch."""
    words, labels = zip(*items, strict=True)
    return {**tokenizer(list(words), padding=True, return_tensors="pt"), "labels": labels}


boundary = tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8))
pipe = tp.Pipeline.from_pretrained(folder, classes=2, cuts=[1], boundary=boundary)
optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
run = tp.Run("runs/classification", pipe, optimizer, metrics=["accuracy", "f1", "matthews"])
for _ in run.epochs(4):
    for batch in run.batches(texts, size=8, collate=collate, longest=16):
        run.step(batch)
    run.evaluate(texts)
