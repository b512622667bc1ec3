"""Learning rates of a torch scheduler, which a resumed run continues.

thinpipe run examples/programs/scheduler.py
"""

import torch
from torch import Tensor, nn

import thinpipe as tp


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU())
        self.out = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Add to x."""
        return x + self.out(self.inner(x))


def model() -> nn.Sequential:
    """Runs on the meta device; each rank fills its own layers only."""
    return nn.Sequential(nn.Embedding(60, 32), *[Block() for _ in range(4)], nn.Linear(32, 60))


steps = torch.arange(17)
tokens = (torch.arange(64)[:, None] + steps * (1 + torch.arange(64)[:, None] % 5)) % 60
samples = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
pipe = tp.Pipeline(model, cuts=[3], boundary=tp.Boundary(forward=tp.AQSGD(bits=4)))
optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
run = tp.Run("runs/scheduler", pipe, optimizer, scheduler=cosine)  # saves its state
for _ in run.epochs(2):
    for batch in run.batches(samples, size=16):
        step = run.step(batch)
        cosine.step()
        run.log(rate=step.lr)
