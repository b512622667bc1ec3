"""Attention masks: every stage is given them, and they never cross a cut.

thinpipe run examples/programs/masks.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinpipe as tp


class Model(nn.Module):
    """Says how many ones there are among the digits that the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(3, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, 1)

    def forward(self, digits: Tensor, mask: Tensor) -> Tensor:
        """Digits and mask [B, T] to numbers [B]."""
        x = self.digits(digits)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=~mask)
        kept = mask[:, :, None].float()
        numbers: Tensor = self.head((x * kept).sum(1)).squeeze(-1)
        return numbers


def loss(numbers: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """The sum over samples, and their number."""
    return F.mse_loss(numbers, counts, reduction="sum"), len(counts)


digits = torch.randint(3, (128, 12), generator=torch.Generator().manual_seed(0))
mask = torch.arange(12) < 4 + torch.arange(128)[:, None] % 9
counts = ((digits == 1) & mask).sum(1).float()
samples = torch.utils.data.TensorDataset(digits, mask, counts)  # the last one is the target
pipe = tp.Pipeline(Model, loss, cuts=[2], boundary=tp.Boundary(forward=tp.Direct(bits=8)))
run = tp.Run("runs/masks", pipe, torch.optim.AdamW(pipe.parameters(), 1e-3), metrics=["pearson"])
for _ in run.epochs(3):
    for batch in run.batches(torch.utils.data.DataLoader(samples, batch_size=32, shuffle=True)):
        run.step(batch)
    run.evaluate(samples)
