"""How much an error in a token matters: known to who sends activations from their gradients.

To second order, errors e in a token add g'ee'g / 2 to the loss, g being the loss's gradient there
(the empirical Fisher information). Errors that weigh alike are cheapest, so steps are inversely
proportional to gradients. Those of a sample's last visit stand in for the next ones: in a real
model their sizes differ 15 times between tokens and stay alike from one epoch to the next
(correlation of logarithms .9; benchmarks/results/pretrained_cpu_202611.md).

Axes: B samples, T tokens, D channels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PER_OCTAVE = 8  # 9 % apart, where steps are half octaves apart
_UNKNOWN = -(2**15)  # int16's least: a gradient of 2^-4096 is no fp32 number
_TRUST = 0.5
"""Of a ratio of gradients, in octaves. All of it is no better: gradients of one visit, with one
label, say little of how much an error would matter on average."""


class TokenWeights:
    """Sizes of gradients by sample; at the sender of activations alone."""

    def __init__(self) -> None:
        self._size_T: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor] = {}

    def take(self, ids_B: Tensor, gradient_BTD: Tensor) -> None:
        octave_BT = gradient_BTD.detach().float().square().mean(2).sqrt().log2().cpu()
        known_BT = torch.isfinite(octave_BT)
        size_BT = (_PER_OCTAVE * octave_BT).round().where(known_BT, _UNKNOWN).to(torch.int16)
        self._staged |= dict(zip(ids_B.tolist(), size_BT, strict=True))

    def octaves(self, samples: list[int], tokens: int) -> Tensor | None:
        """By how many octaves each token of these weighs more than the others; None if unknown.

        Samples of unknown weight weigh like the others' mean.
        """
        nothing_T = torch.full((tokens,), _UNKNOWN, dtype=torch.int16)
        found_N = torch.cat([self._size_T.get(sample, nothing_T) for sample in samples])
        known_N = found_N != _UNKNOWN
        if not bool(known_N.any()):
            return None
        octave_N = _TRUST * found_N.float() / _PER_OCTAVE
        return torch.where(known_N, octave_N - octave_N[known_N].mean(), 0.0)

    def finish_step(self, *, keep: bool) -> None:
        if keep:
            self._size_T |= self._staged
        self._staged = {}

    def state_dict(self) -> dict[str, Any]:
        ids = sorted(self._size_T)
        rows = torch.stack([self._size_T[i] for i in ids]) if ids else torch.zeros(0, 0)
        return {"ids": torch.tensor(ids, dtype=torch.int64), "sizes": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._size_T = dict(zip(state["ids"].tolist(), state["sizes"].clone(), strict=True))
        self._staged = {}
