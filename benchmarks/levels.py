"""Which levels should few bits have? Ours (with zero) against mid-rise, on real activations.

    python -m benchmarks.levels wikitext2/valid.txt

Trains a small byte-level model on the text, then goes on training on a few samples for some epochs
and follows AQ-SGD's memory of each at the middle cut. Printed: the squared error of a change
relative to the change (c_Q^2; below 0.5 the method converges), and the relative error of the
memory after the last epoch. Mid-rise has 2^b levels at odd multiples of half a step, none at zero.

Axes: B samples, T tokens, D channels, K groups, G values per group.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.transformer import TransformerConfig, TransformerStage, build_layers
from pipeline.wire.uniform import Uniform

CONFIG = TransformerConfig(layers=4, width=128, heads=4, context=128)
EPOCHS, SAMPLES = 6, 32


def mid_rise(x_BN: Tensor, bits: int, group: int) -> Tensor:
    """Nearest of the levels (2 q + 1) * s / 2, q in [-2^(b-1), 2^(b-1) - 1], up to the extreme."""
    x_BKG = x_BN.view(x_BN.shape[0], -1, group)
    top = (1 << bits) - 1
    unit = (x_BKG.abs().amax(-1, keepdim=True) / top).bfloat16().float().clamp_min(1e-30)
    odd = 2 * torch.floor(x_BKG / (2 * unit)) + 1
    return (odd.clamp(-top, top) * unit).view_as(x_BN)


def with_zero(x_BN: Tensor, bits: int, group: int) -> Tensor:
    """The codec of the library."""
    codec, seen_BN = Uniform(bits, group), torch.empty_like(x_BN)
    wire_BW = torch.empty(x_BN.shape[0], codec.nbytes(x_BN.shape[1]), dtype=torch.uint8)
    codec.encode(x_BN, wire_BW, seen_BN, noise=None)
    return seen_BN


LEVELS = {"with zero": with_zero, "mid-rise": mid_rise}


class Model:
    """Two stages, one optimizer."""

    def __init__(self) -> None:
        half = CONFIG.layers // 2
        self.lower: TransformerStage = build_layers(CONFIG, 0, half, seed=0, device="cpu")
        self.upper: TransformerStage = build_layers(
            CONFIG, half, CONFIG.layers, seed=0, device="cpu"
        )
        parameters = [*self.lower.parameters(), *self.upper.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(self, text_BT: Tensor) -> Tensor:
        """Train on a batch; returns the activations at the cut."""
        at_cut: Tensor = self.lower(text_BT[:, :-1])
        logits = self.upper(at_cut)
        loss = F.cross_entropy(logits.flatten(0, 1), text_BT[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return at_cut.detach()


def batches(text: Tensor, count: int) -> Tensor:
    """Random samples of the text, [count, T + 1]."""
    generator = torch.Generator().manual_seed(count)
    starts = torch.randint(0, len(text) - CONFIG.context - 1, (count,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(CONFIG.context + 1)]


def visits(text: Tensor, steps: int) -> list[Tensor]:
    """Activations of the same samples, epoch by epoch, while training goes on."""
    model = Model()
    for text_BT in torch.split(batches(text, 16 * steps), 16):
        model.step(text_BT)
    for group in model.optimizer.param_groups:
        group["lr"] = 1e-4
    samples = torch.split(batches(text, SAMPLES), 8)
    return [torch.cat([model.step(part) for part in samples]).flatten(1) for _ in range(EPOCHS)]


def follow(found: list[Tensor], name: str, bits: int, group: int) -> tuple[float, float]:
    """(c_Q^2 over all changes, relative error of the memory at the end)."""
    memory, wrong, changed = found[0].clone(), 0.0, 0.0
    for x_BN in found[1:]:
        change = x_BN - memory
        seen = LEVELS[name](change, bits, group)
        wrong += float((change - seen).square().sum())
        changed += float(change.square().sum())
        memory += seen
    return wrong / changed, float((found[-1] - memory).norm() / found[-1].norm())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    found = visits(text, options.steps)
    channels = found[0].view(-1, CONFIG.width).square().mean(0).sqrt()
    print(f"channel rms, largest / median: {float(channels.max() / channels.median()):.2f}")
    for bits in (1, 2, 3, 4):
        for group in (64, 128):
            for name in LEVELS:
                error, memory = follow(found, name, bits, group)
                print(f"{bits} bits, group {group}, {name:9}: c^2 {error:.4f}, memory {memory:.5f}")


if __name__ == "__main__":
    main()
