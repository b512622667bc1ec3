"""A metric of your own beside named ones; every rank counts what it sees, and sums are gathered.

thinpipe run examples/programs/metric.py
"""

import torch
from torch import Tensor, nn

import thinpipe as tp


def model() -> nn.Sequential:
    """Runs on the meta device; each rank fills its own layers only."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(60, 32), *blocks, nn.Linear(32, 60))


def among_three(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """How often the target is among the three likeliest: a sum and how many it is of."""
    return (logits.topk(3).indices == target[..., None]).sum(), target.numel()


class Margin:
    """Not a mean: the smallest margin. Tallies are added, so it keeps a histogram."""

    def tally(self, logits: Tensor, target: Tensor) -> Tensor:
        """How many margins are in each of ten bins of width 1 (float64 [10])."""
        best = logits.topk(2).values
        return torch.histc((best[..., 0] - best[..., 1]).double(), bins=10, min=0, max=10)

    def value(self, tally: Tensor) -> float:
        """The lowest bin that has any."""
        return float(tally.nonzero()[0]) if tally.any() else float("nan")


tokens = (torch.arange(64)[:, None] + torch.arange(17)) % 60
samples = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
pipe = tp.Pipeline(model, cuts=(), replicas=2, exchange="cocktail")
metrics = ["accuracy", "perplexity", among_three, Margin()]
run = tp.Run("runs/metric", pipe, torch.optim.AdamW(pipe.parameters(), 1e-2), metrics=metrics)
for _ in run.epochs(2):
    for batch in run.batches(samples, size=16):
        run.step(batch)
    run.evaluate(samples)  # shown, and in metrics.jsonl
