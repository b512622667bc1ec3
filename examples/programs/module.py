"""A module with a forward of its own, cut between its blocks.

thinpipe run examples/programs/module.py
"""

import torch
from torch import Tensor, nn

import thinpipe as tp


class Model(nn.Module):
    """Adds up what it has seen: targets are running sums, modulo 10."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to logits [B, T, 10]."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:  # cuts lie between them; masks are made on every stage
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


digits = torch.randint(10, (128, 16), generator=torch.Generator().manual_seed(0))
samples = list(zip(digits, digits.cumsum(1) % 10, strict=True))
pipe = tp.Pipeline(Model, cuts=[2], boundary=tp.Boundary(forward=tp.AQSGD(bits=4)))
run = tp.Run("runs/module", pipe, torch.optim.AdamW(pipe.parameters(), 3e-3))
for _ in run.epochs(3):
    for batch in run.batches(samples, size=32):
        run.step(batch)
run.save_model("runs/module/model.safetensors")
