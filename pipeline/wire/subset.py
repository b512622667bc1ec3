"""Which coordinates of a flat vector take part in a step, known to all ranks without a byte sent.

The vector is cut into runs of neighbouring values. A keyed permutation deals the runs out like a
deck of cards: step t of a window takes the next a / q of them, going round, where a / q is the
fraction in lowest terms and a window is q steps. So in a window every coordinate takes part exactly
a times, never more than ceil(q / a) steps apart, and every window is dealt from scratch. Only whole
runs are chosen: memory is read in cache lines, and neighbours, which are of one layer, share
scales.

The permutation is a Feistel network with cycle walking (`kernels/cpu/subset.py`). Its round keys
are Philox4x64-10 numbers, key = seed, counter = (bucket, window): nothing is drawn from a generator
with state, so no subset depends on which were drawn before it.

Axes: N values of the vector, R chosen runs, n chosen values.
"""

import functools
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import cast

import numpy as np
import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.sparse import SparseKernels

RUN = 64  # four cache lines of fp32, two of bf16
_ROUNDS = 6  # of the Feistel network; an even number, as a word of Philox is two keys
_LARGEST_WINDOW = 1000  # steps; fractions that need a longer one are rejected


@dataclass(frozen=True)
class Subset:
    """Runs of `RUN` values that start at `start_R` (int64, rising, on the CPU).

    `size` is n: the last run of the vector may be a short one. Vectors are contiguous, in fp32
    or bf16; values of the subset are fp32. Methods raise ValueError where a size is another.
    """

    numel: int
    start_R: Tensor
    size: int

    def gather(self, x_N: Tensor, out_n: Tensor, base_N: Tensor | None = None) -> None:
        """Copy the chosen values, or what they are above those of `base_N`, to `out_n`."""
        self._check((x_N,) if base_N is None else (x_N, base_N), (out_n,))
        self._kernels(x_N).gather(x_N, base_N, self.start_R, RUN, out_n)

    def scatter(self, value_n: Tensor, out_N: Tensor) -> None:
        """Copy values to the chosen places of `out_N`; other places keep what they hold."""
        self._check((out_N,), (value_n,))
        self._kernels(out_N).scatter(value_n, self.start_R, RUN, out_N)

    def apply_exchanged(self, sent_n: Tensor, mean_n: Tensor, x_N: Tensor, base_N: Tensor) -> None:
        """At the chosen places, add `mean_n` to base, and leave x above it by what was not sent.

        That is x += mean - sent, put together from the new base: x ends bit-equal to it if all of
        the difference was sent. One pass instead of five.
        """
        self._check((x_N, base_N), (sent_n, mean_n))
        self._kernels(x_N).apply_exchanged(sent_n, mean_n, self.start_R, RUN, x_N, base_N)

    def _check(self, vectors: tuple[Tensor, ...], chosen: tuple[Tensor, ...]) -> None:
        """Compiled code would write past the end."""
        for tensors, numel in ((vectors, self.numel), (chosen, self.size)):
            for t in tensors:
                if t.numel() != numel or not t.is_contiguous():
                    raise ValueError(f"a tensor of {t.numel()} values: needs {numel}, contiguous")

    @staticmethod
    def _kernels(x_N: Tensor) -> SparseKernels:
        return cast(SparseKernels, load("sparse", device=x_N.device))


def random_subset(
    numel: int, *, fraction: float | Fraction, seed: int, step: int, bucket: int
) -> Subset:
    """The runs of step `step`, out of a vector of `numel` values.

    `seed` has 64 bits and `bucket` numbers the vectors of a run.
    """
    part = exact_fraction(fraction)
    window, turn = divmod(step, part.denominator)
    runs = -(-numel // RUN)
    first, last = (ceil(runs * part * i) for i in (turn, turn + 1))
    chosen_R = torch.arange(last - first)
    if part < 1:
        load("subset", "numba").deal(first, runs, _round_keys(seed, window, bucket), chosen_R)
    size = chosen_R.numel() * RUN
    if chosen_R.numel() and int(chosen_R[-1]) == runs - 1:
        size -= runs * RUN - numel
    return Subset(numel, chosen_R * RUN, size)


@functools.lru_cache
def exact_fraction(fraction: float | Fraction) -> Fraction:
    """The ratio that a decimal number stands for: 0.15 is 3 / 20, 0.3333333333333333 is 1 / 3.

    Raises:
        ValueError: it is not in (0, 1], or no ratio with a denominator up to 1000.
    """
    part = Fraction(fraction).limit_denominator(_LARGEST_WINDOW)
    if not 0 < part <= 1 or abs(part - Fraction(fraction)) > 1e-12:
        raise ValueError(
            f"fraction = {fraction}: use a number in (0, 1] that is a ratio of whole numbers up to "
            f"{_LARGEST_WINDOW}, such as 0.1, 0.125 or 1 / 3"
        )
    return part


def _round_keys(seed: int, window: int, bucket: int) -> list[int]:
    counter = np.array([bucket, window, 0, 0], np.uint64)
    key = np.array([seed % 2**64, 0], np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw(_ROUNDS // 2).tolist()
    return [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
