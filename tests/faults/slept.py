"""A model whose ranks compute by sleeping, as if each had a processor of its own."""

import os
import time

import torch
from torch import Tensor, nn

STEP_S = "SLEPT_STEP_S"
"""Environment variable: how long four samples of a replica take; by default a second."""
_WIDTH, _BLOCKS = 256, 4
_SAMPLE_S = float(os.environ.get(STEP_S, "1")) / 4 / _BLOCKS


class Block(nn.Module):
    """Learns a little, and sleeps as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """A residual."""
        if torch.is_grad_enabled() and type(x_BTD) is Tensor and not x_BTD.is_meta:
            time.sleep(_SAMPLE_S * len(x_BTD))
        moved: Tensor = self.mix(x_BTD)
        return x_BTD + moved.tanh()


def model() -> nn.Sequential:
    """Learns bytes."""
    blocks = [Block() for _ in range(_BLOCKS)]
    return nn.Sequential(nn.Embedding(256, _WIDTH), *blocks, nn.Linear(_WIDTH, 256))
