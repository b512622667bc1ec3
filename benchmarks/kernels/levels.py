"""Which levels should few bits have? Ours (with zero) against mid-rise, on real activations.

    python -m benchmarks.kernels.levels wikitext2/valid.txt

Trains a small byte-level model on the text, then goes on training on a few samples for some epochs
and follows AQ-SGD's memory of each at the middle cut. Printed: the squared error of a change
relative to the change (c_Q^2; below 0.5 the method converges), and the relative error of the
memory after the last epoch. Mid-rise has 2^b levels at odd multiples of half a step, none at zero.
A second table follows 16 levels of a step that follows the rms (`rate`), beside fixed bits: there,
bits are those of a message of 8 samples, scales included, as zstd leaves it.

Axes: B samples, T tokens, D channels, K groups, G values per group.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import format_table
from thinpipe.pipeline.models.transformer import TransformerConfig, TransformerStage, build_layers
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.coding.entropy import compress
from thinpipe.pipeline.wire.uniform import Uniform

CONFIG = TransformerConfig(layers=4, width=128, heads=4, context=128)
EPOCHS, SAMPLES = 6, 32


def mid_rise(x_BN: Tensor, bits: int, group: int) -> Tensor:
    """Nearest of the levels (2 q + 1) * s / 2, q in [-2^(b-1), 2^(b-1) - 1], up to the extreme."""
    x_BKG = x_BN.view(x_BN.shape[0], -1, group)
    top = (1 << bits) - 1
    unit = (x_BKG.abs().amax(-1, keepdim=True) / top).bfloat16().float().clamp_min(1e-30)
    odd = 2 * torch.floor(x_BKG / (2 * unit)) + 1
    return (odd.clamp(-top, top) * unit).view_as(x_BN)


def through(codec: Codec, x_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(what is sent, what is decoded)."""
    wire_BW = torch.empty(x_BN.shape[0], codec.capacity(x_BN.shape[1]), dtype=torch.uint8)
    seen_BN = torch.empty_like(x_BN)
    codec.encode(x_BN, wire_BW, seen_BN, noise=None)
    return wire_BW, seen_BN


def with_zero(x_BN: Tensor, bits: int, group: int) -> Tensor:
    """The codec of the library."""
    return through(Uniform(bits, group), x_BN)[1]


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

    def step(self, text_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Train on a batch; returns activations [B, N] and their gradients at the cut."""
        at_cut: Tensor = self.lower(text_BT[:, :-1])
        at_cut.retain_grad()
        logits = self.upper(at_cut)
        loss = F.cross_entropy(logits.flatten(0, 1), text_BT[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert at_cut.grad is not None
        return at_cut.detach().flatten(1), at_cut.grad.flatten(1)


def batches(text: Tensor, count: int) -> Tensor:
    """Random samples of the text, [count, T + 1]."""
    generator = torch.Generator().manual_seed(count)
    starts = torch.randint(0, len(text) - CONFIG.context - 1, (count,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(CONFIG.context + 1)]


def visits(text: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Activations and gradients of the same samples, by epoch, while training goes on."""
    model = Model()
    for text_BT in torch.split(batches(text, 16 * steps), 16):
        model.step(text_BT)
    for group in model.optimizer.param_groups:
        group["lr"] = 1e-4
    samples = torch.split(batches(text, SAMPLES), 8)
    epochs = [[model.step(part) for part in samples] for _ in range(EPOCHS)]
    return [(torch.cat([x for x, _ in e]), torch.cat([g for _, g in e])) for e in epochs]


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


def coded_bits(wire_BW: Tensor, values: int) -> float:
    """Bits per value after entropy coding, in messages of 8 rows."""
    nbytes = 0
    for part in torch.split(wire_BW, 8):
        payload = part.reshape(-1)
        nbytes += compress(payload, torch.empty_like(payload)) or payload.numel()
    return 8 * nbytes / values


def follow_codec(found: list[Tensor], codec: Uniform, *, direct: bool) -> tuple[float, ...]:
    """(bits, bits after coding, squared error relative to what is sent) over all visits."""
    memory, wrong, sent, sizes = found[0].clone(), 0.0, 0.0, []
    for x_BN in found[1:]:
        value_BN = x_BN if direct else x_BN - memory
        wire_BW, seen_BN = through(codec, value_BN)
        wrong += float((value_BN - seen_BN).square().sum())
        sent += float(value_BN.square().sum())
        sizes.append((8 * wire_BW.numel() / x_BN.numel(), coded_bits(wire_BW, x_BN.numel())))
        memory += seen_BN
    fixed, coded = (sum(size) / len(sizes) for size in zip(*sizes, strict=True))
    return fixed, coded, wrong / sent


def print_rates(found: list[Tensor], group: int) -> None:
    """The second table, as Markdown."""
    codecs = {f"{bits} bits": Uniform(bits, group) for bits in (1, 2, 3, 4)}
    codecs |= {f"rate {c}": Uniform(4, group, rate=c) for c in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)}
    rows = []
    for name, codec in codecs.items():
        changes, values = (follow_codec(found, codec, direct=direct) for direct in (False, True))
        numbers = (*changes, *values[1:])
        cells = zip(numbers, (2, 2, 4, 2, 4), strict=True)
        rows.append([name, *(f"{number:.{digits}f}" for number, digits in cells)])
    heads = ["", "fixed", "change, coded", "c_Q^2", "activation, coded", "error^2"]
    print(f"\nGroups of {group}\n\n{format_table(heads, rows)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    found = [values for values, _ in visits(text, options.steps)]
    channels = found[0].view(-1, CONFIG.width).square().mean(0).sqrt()
    print(f"channel rms, largest / median: {float(channels.max() / channels.median()):.2f}")
    for bits in (1, 2, 3, 4):
        for group in (64, 128):
            for name in LEVELS:
                error, memory = follow(found, name, bits, group)
                print(f"{bits} bits, group {group}, {name:9}: c^2 {error:.4f}, memory {memory:.5f}")
    for group in (64, 128):
        print_rates(found, group)


if __name__ == "__main__":
    main()
