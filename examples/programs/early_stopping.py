"""The checkpoint of the best evaluation is kept, and the run ends when it is not beaten.

thinpipe run examples/programs/early_stopping.py
"""

import torch
from torch import nn

import thinpipe as tp


def model() -> nn.Sequential:
    """Runs on the meta device; each rank fills its own layers only."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(60, 32), *blocks, nn.Linear(32, 60))


def noise(seed: int) -> torch.utils.data.TensorDataset:
    """Nothing that is learned of it holds for other samples."""
    tokens = torch.randint(60, (32, 17), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


boundary = tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8))
pipe = tp.Pipeline(model, cuts=[3], boundary=boundary)
optimizer = torch.optim.AdamW(pipe.parameters(), 3e-2)
run = tp.Run("runs/early_stopping", pipe, optimizer, best="loss", patience=2)
for _ in run.epochs(20):
    for batch in run.batches(noise(0), size=16):
        run.step(batch)
    run.evaluate(noise(1))
best = tp.load("runs/early_stopping", step="best")  # an ordinary module
