"""Several adapters of one model: a run each, whose checkpoints hold the adapter alone.

thinpipe run examples/programs/adapters.py FOLDER plus
thinpipe run examples/programs/adapters.py FOLDER minus
"""

import sys

import torch
from transformers import AutoTokenizer

import thinpipe as tp

folder, task = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(folder)
sign = {"plus": 1, "minus": -1}[task]


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts such as `7 plus 2 is 9`, all with equally many tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        text = f"{4 + i % 4} {task} {i // 4} is {4 + i % 4 + sign * (i // 4)}"
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        return {"input_ids": ids, "labels": ids}


boundary = tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8))
pipe = tp.Pipeline.from_pretrained(folder, lora={"rank": 4}, cuts=[1], boundary=boundary)
run = tp.Run(f"runs/{task}", pipe, torch.optim.AdamW(pipe.parameters(), 1e-2))
for _ in run.epochs(3):
    for batch in run.batches(Sums(), size=8):
        run.step(batch)
