"""What do rotated tiles that trade bits gain over plain groups, on what crosses a cut?

    python -m benchmarks.kernels.tiles wikitext2/valid.txt

Trains a small byte-level model on the text, then goes on with a few samples for some epochs and
takes activations, gradients and changes of activations between epochs at the middle cut; "outliers"
are the activations with one channel of every fourth token 40 times larger. Printed, for each number
of bits: the error relative to the values of plain groups of 64 and of tiles of 64, and the shares
of tiles that were rotated and that traded a bit.

Axes: B samples, T tokens, D channels, N = T * D values of a sample, W bytes.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import format_table
from benchmarks.kernels.levels import CONFIG, SAMPLES, through, visits
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.uniform import Uniform

TILE = 64
OUTLIER_CHANNEL, OUTLIER_TOKENS, OUTLIER = 5, 4, 40.0


def crossing(text: Tensor, steps: int) -> dict[str, Tensor]:
    """What crosses the cut after `steps` steps, by kind, [B, N]."""
    *_, (earlier, _), (values, gradients) = visits(text, steps)
    outliers_BTD = values.view(SAMPLES, -1, CONFIG.width).clone()
    outliers_BTD[:, ::OUTLIER_TOKENS, OUTLIER_CHANNEL] *= OUTLIER
    return {
        "activations": values,
        "gradients": gradients,
        "changes": values - earlier,
        "outliers": outliers_BTD.flatten(1),
    }


def error(codec: Uniform | Hadamard, x_BN: Tensor) -> tuple[float, Tensor]:
    """|decoded - x| / |x|, and the bytes [B, W]."""
    wire_BW, seen_BN = through(codec, x_BN)
    return float((seen_BN - x_BN).norm() / x_BN.norm()), wire_BW


def shares(wire_BW: Tensor, tiles: int) -> tuple[float, float]:
    """Shares of tiles that are rotated, and that have a bit more or less."""
    maps_B3V = wire_BW[:, : 3 * -(-tiles // 8)].view(wire_BW.shape[0], 3, -1)
    ones_3 = (maps_B3V.unsqueeze(3) >> torch.arange(8) & 1).sum((0, 2, 3)).tolist()
    return ones_3[0] / tiles / len(wire_BW), (ones_3[1] + ones_3[2]) / tiles / len(wire_BW)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    rows = []
    for kind, x_BN in crossing(text, options.steps).items():
        for bits in (2, 3, 4, 6):
            plain, _ = error(Uniform(bits, TILE), x_BN)
            tiles, wire_BW = error(Hadamard(bits, TILE), x_BN)
            rotated, traded = shares(wire_BW, x_BN.shape[1] // TILE)
            numbers = [f"{plain:.4f}", f"{tiles:.4f}", f"{tiles / plain - 1:+.0%}"]
            rows.append([kind, str(bits), *numbers, f"{rotated:.0%}", f"{traded:.0%}"])
    heads = ("values", "bits", "groups", "tiles", "tiles to groups", "rotated", "traded")
    print(format_table(heads, rows))


if __name__ == "__main__":
    main()
