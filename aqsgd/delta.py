"""AQ-SGD: send the quantized change of a sample's activation since its last visit.

Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
Guarantees", NeurIPS 2022 (arXiv 2206.01299), Algorithm 1. Symbols: a(x) -> x_BTD, m(x) ->
memory_BN, Q -> delta codec, d = Q(a - m). First visits go through a codec of their own (the paper:
full precision; by default 8 bits here). Both ends do m := m + d in fp32 from the same bytes.

A payload is the rows of first visits, in order, then those of known samples, in order.

Axes: B samples, T tokens, D channels, N = T * D values of a sample.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aqsgd.memory import SampleMemory
from pipeline.wire.codec import Codec, Noise

CODEC_ID = 32


class DeltaBoundary:
    """One end of one direction of a cut under AQ-SGD.

    The sender's `encode` and the receiver's `decode` make the same change to their memories. The
    receiver computes with m + d, as in the paper, not with the stored (rounded) memory.
    """

    codec_id = CODEC_ID

    def __init__(self, memory: SampleMemory, *, first_visit: Codec, delta: Codec, key: int) -> None:
        """`key` addresses the random numbers of stochastic codecs; it is the same at both ends."""
        self.memory = memory
        self._first_visit, self._delta, self._key = first_visit, delta, key

    @property
    def bits(self) -> int:
        """Bits per value of a change."""
        return self._delta.bits

    def nbytes(self, shape_BTD: torch.Size, ids_B: Tensor) -> int:
        """First visits at their codec's size, known samples at the delta codec's."""
        numel = shape_BTD[1:].numel()
        known = int(self.memory.known(ids_B).sum())
        first = len(ids_B) - known
        return first * self._first_visit.nbytes(numel) + known * self._delta.nbytes(numel)

    def capacity(self, shape_BTD: torch.Size) -> int:
        """All of them first visits, or all known."""
        numel = shape_BTD[1:].numel()
        return shape_BTD[0] * max(self._first_visit.nbytes(numel), self._delta.nbytes(numel))

    def encode(self, x_BTD: Tensor, ids_B: Tensor, wire: Tensor, *, step: int) -> None:
        """Fill `wire` and stage what the receiver will have seen."""
        x_BN = x_BTD.detach().reshape(len(ids_B), -1).float()
        known_B, memory_BN = self._recall(ids_B, x_BN.shape[1])
        noise = Noise(self._key, step, ids_B)
        target_BN = x_BN - memory_BN
        seen_BN = torch.empty_like(x_BN)
        for codec, rows_B, part in self._parts(wire, known_B, x_BN.shape[1]):
            seen = torch.empty_like(x_BN[rows_B])
            row_noise = Noise(noise.key, noise.step, ids_B[rows_B])
            codec.encode(target_BN[rows_B], part, seen, noise=row_noise)
            seen_BN[rows_B] = seen
        self.memory.stage(ids_B, memory_BN + seen_BN)

    def decode(self, wire: Tensor, ids_B: Tensor, out_BTD: Tensor) -> None:
        """Fill `out_BTD` with m + d and stage it."""
        rows, numel = len(ids_B), out_BTD[0].numel()
        known_B, memory_BN = self._recall(ids_B, numel)
        change_BN = torch.empty(rows, numel)
        for codec, rows_B, part in self._parts(wire, known_B, numel):
            change = torch.empty(int(rows_B.sum()), numel)
            codec.decode(part, change)
            change_BN[rows_B] = change
        value_BN = memory_BN + change_BN
        out_BTD.copy_(value_BN.view_as(out_BTD))
        self.memory.stage(ids_B, value_BN)

    def finish_step(self, *, keep: bool) -> None:
        """Commit the step's values to memory, or forget them."""
        if keep:
            self.memory.commit()
        else:
            self.memory.discard()

    def state_dict(self) -> dict[str, Any]:
        """The memory."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory."""
        self.memory.load_state_dict(state)

    def _recall(self, ids_B: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Which samples are known, and their memory in fp32; zero for the others."""
        known_B = self.memory.known(ids_B)
        memory_BN = torch.zeros(len(ids_B), numel)
        memory_BN[known_B] = self.memory.read(ids_B[known_B], numel)
        return known_B, memory_BN

    def _parts(
        self, wire: Tensor, known_B: Tensor, numel: int
    ) -> list[tuple[Codec, Tensor, Tensor]]:
        """(codec, which rows, their bytes [rows, W]) for first visits and for changes."""
        parts: list[tuple[Codec, Tensor, Tensor]] = []
        start = 0
        for codec, rows_B in ((self._first_visit, ~known_B), (self._delta, known_B)):
            count, width = int(rows_B.sum()), codec.nbytes(numel)
            if count:
                part = wire[start : start + count * width].view(count, width)
                parts.append((codec, rows_B, part))
            start += count * width
        return parts
