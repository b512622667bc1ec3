"""A model and data of one's own: learns to continue arithmetic sequences, modulo 60.

thinpipe run examples/own_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinpipe as tp

VOCAB, WIDTH = 60, 64


class Block(nn.Module):
    """Sees the token before and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add what follows from both."""
        now = self.norm(x_BTD)
        before = F.pad(now, (0, 0, 1, 0))[:, :-1]
        return x_BTD + self.out(F.gelu(self.mix(torch.cat([now, before], -1))))


def model() -> nn.Sequential:
    """Runs on the meta device; each rank fills its own layers only."""
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), *[Block() for _ in range(6)], nn.Linear(WIDTH, VOCAB)
    )


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample i begins anywhere and grows by 1 to 9 at every token."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCAB, (count, 1), generator=generator)
        growth = torch.randint(1, 10, (count, 1), generator=generator)
        self.tokens = (starts + growth * torch.arange(33)) % VOCAB

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.tokens[i, :-1], self.tokens[i, 1:]


def loss(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The sum over tokens, and their number."""
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return total, target.numel()


if __name__ == "__main__":
    pipe = tp.Pipeline(
        model,
        loss,
        cuts=[3, 5],
        microbatches=4,
        boundary=tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8)),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), 3e-3)
    run = tp.Run("runs/own_model", pipe, optimizer, resume="never")
    training, held_out = Sequences(256, seed=0), Sequences(64, seed=1)
    for _ in run.epochs(5):
        for batch in run.batches(training, size=32):
            run.step(batch)
        run.evaluate(held_out)
    run.save_model("runs/own_model/model.safetensors")
