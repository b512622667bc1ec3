"""Batches that are dicts, padded by a collate function to the longest sample of each.

thinpipe run examples/programs/dict_batch.py
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import thinpipe as tp


class Model(nn.Module):
    """Its forward takes the members of a batch by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 32), nn.Embedding(2, 32)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in "1234"])
        self.head = nn.Linear(32, 50)

    def forward(self, words: Tensor, kind: Tensor) -> Tensor:
        """Words [B, T] and kinds [B] to logits [B, T, 50]."""
        logits: Tensor = self.head(self.blocks(self.words(words) + self.kinds(kind)[:, None]))
        return logits


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """-100 is a target that does not count."""
    words = pad_sequence([item["words"] for item in items], batch_first=True)
    labels = pad_sequence([item["labels"] for item in items], True, -100)
    return {"words": words, "kind": torch.stack([item["kind"] for item in items]), "labels": labels}


samples = []
for i in range(96):
    words = (i + torch.arange(5 + i % 8)) % 50
    samples.append({"words": words, "kind": torch.tensor(i % 2), "labels": (words + i % 2) % 50})
boundary = tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8))
pipe = tp.Pipeline(Model, cuts=[2], boundary=boundary)
run = tp.Run("runs/dict_batch", pipe, torch.optim.AdamW(pipe.parameters(), 1e-2))
for _ in run.epochs(3):
    for batch in run.batches(samples, size=24, collate=collate, longest=12):
        run.step(batch)
    run.evaluate(samples[:24])
