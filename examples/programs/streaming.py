"""Samples that come one after the other, without a length; a resumed run reads on.

thinpipe run examples/programs/streaming.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import thinpipe as tp


class Numbers(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Counts on from ever other beginnings. Every __iter__ begins anew."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endlessly."""
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = (torch.randint(60, (1,), generator=generator) + torch.arange(17)) % 60
            yield tokens[:-1], tokens[1:]


def model() -> nn.Sequential:
    """Runs on the meta device; each rank fills its own layers only."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(60, 32), *blocks, nn.Linear(32, 60))


# a sample comes once, so that a boundary has nothing to cache
boundary = tp.Boundary(forward=tp.Stateless(bits=4), backward=tp.Direct(bits=8))
pipe = tp.Pipeline(model, cuts=[3], boundary=boundary)
settings = {"checkpoint": {"every_steps": 4}}
optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
run = tp.Run("runs/streaming", pipe, optimizer, settings=settings)
for _ in run.epochs(1):
    for batch in run.batches(Numbers(), size=16, steps=10):
        run.step(batch)
