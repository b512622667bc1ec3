"""QSDP: fully sharded training with quantized weights and gradients.

Markov, Vladu, Guo and Alistarh, "Quantized Distributed Training of Large Models with Convergence
Guarantees", ICML 2023. Whoever gathers a weight gets Q(w), the owner of the shard included, so all
compute with the same weights; gradients are quantized once on their way to the owner, which sums
them in fp32. The full-precision shard is never quantized, and there is no error feedback.

Of a bucket of values x, from its least one lo to its largest hi in steps of d, as codes q < 2^b:

    shift       q = round((x - lo - r) / d), one r ~ U[-d/2, d/2) per bucket; Q = lo + r + d q.
                Unbiased, and E (Q - x)^2 = d^2 / 12 for every x
    learned     a table of 2^b levels in [0, 1], to the nearest of (x - lo) / (hi - lo); the levels
                follow the weights (Algorithm 1: SGD on the square error, which is 1-d k-means)
    stochastic, nearest   `pipeline/wire/uniform.py`: levels around 0, one scale per bucket.
                Stochastic rounding is unbiased too, with an error of d^2 / 6 on average

A receiver needs lo + r and d (fp32) alone, so shifts are not sent.

Axes: B rows (always 1), N values of a row, W bytes of it, K buckets, G values of a bucket.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.gradcomp.sharded.config import GradientRounding, ShardsConfig, WeightRounding
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.kernels.reference.uniform import pack, uniform16, unpack
from thinpipe.pipeline.wire.uniform import Uniform

_SAMPLE = 8192  # values at most that levels learn from at a time
_SCALE_NBYTES = 8  # two fp32 numbers


@dataclass(frozen=True)
class _Bucketed:
    """Two numbers (fp32) per bucket, a start and a factor, and codes."""

    bits: int
    bucket: int

    def capacity(self, numel: int) -> int:
        return _SCALE_NBYTES * -(-numel // self.bucket) + self.bits * -(-numel // 8)

    def _write(self, wire_BW: Tensor, scales: tuple[Tensor, Tensor], code_BN: Tensor) -> None:
        split = _SCALE_NBYTES * len(scales[0])
        wire_BW[0, :split] = torch.cat(scales).view(torch.uint8)
        wire_BW[:, split:] = pack(code_BN, self.bits)

    def _read(self, wire_BW: Tensor, out_BN: Tensor, values: Callable[[Tensor], Tensor]) -> None:
        """Write the `values` of codes times their bucket's factor, plus its start."""
        numel = out_BN.shape[1]
        buckets = -(-numel // self.bucket)
        split = _SCALE_NBYTES * buckets
        start_K, factor_K = wire_BW[0, :split].clone().view(torch.float32).view(2, buckets)
        code_KG = _buckets(unpack(wire_BW[:, split:], self.bits, numel), self.bucket)
        value_KG = values(code_KG).mul_(factor_K[:, None]).add_(start_K[:, None])
        out_BN.copy_(value_KG.view(1, -1)[:, :numel])


class Shifted(_Bucketed):
    """Buckets from their least to their largest value in 2^bits equal steps, shifted at random."""

    codec_id = 24

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        if noise is None:
            raise ValueError("random shifts need noise: pass the key of the run and place")
        x_KG = _buckets(x_BN, self.bucket)
        low_K, span_K = _range(x_KG)
        step_K = span_K / (2**self.bits - 1)
        shift_K = (uniform16(noise, len(low_K))[0] + 0.5) / 65536.0 - 0.5
        low_K = low_K + shift_K * step_K
        inverse_K = torch.where(step_K > 0, 1.0 / step_K, 0.0)
        code_KG = (x_KG - low_K[:, None]).mul_(inverse_K[:, None]).round_()
        code_KG = code_KG.clamp_(0, 2**self.bits - 1).to(torch.uint8)
        self._write(wire_BW, (low_K, step_K), code_KG.view(1, -1)[:, : x_BN.shape[1]])
        if seen_BN is not None:
            self.decode(wire_BW, seen_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        self._read(wire_BW, out_BN, Tensor.float)


@dataclass(frozen=True)
class Learned(_Bucketed):
    """The nearest of 2^bits levels between a bucket's extremes; the levels travel along.

    `level_L` (fp32, ascending, in [0, 1]) is what `learn` changes.
    """

    level_L: Tensor
    codec_id = 25

    @classmethod
    def uniform(cls, bits: int, bucket: int) -> "Learned":
        return cls(bits, bucket, torch.linspace(0, 1, 2**bits))

    def capacity(self, numel: int) -> int:
        return (4 << self.bits) + super().capacity(numel)

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        low_K, span_K, unit_KG = self._normalized(x_BN)
        code_KG = torch.bucketize(unit_KG, self._middles()).to(torch.uint8)
        levels = 4 << self.bits
        wire_BW[0, :levels] = self.level_L.view(torch.uint8)
        code_BN = code_KG.view(1, -1)[:, : x_BN.shape[1]]
        self._write(wire_BW[:, levels:], (low_K, span_K), code_BN)
        if seen_BN is not None:
            self.decode(wire_BW, seen_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        levels = 4 << self.bits
        level_L = wire_BW[0, :levels].clone().view(torch.float32)
        self._read(wire_BW[:, levels:], out_BN, lambda code_KG: level_L[code_KG.long()])

    def learn(self, x_BN: Tensor) -> None:
        """Move every level to the mean of the values nearest to it."""
        *_, unit_KG = self._normalized(x_BN)
        sample_N = unit_KG.flatten()[: x_BN.shape[1] : max(1, x_BN.shape[1] // _SAMPLE)]
        sample_N = sample_N[sample_N.isfinite()]
        nearest_N = torch.bucketize(sample_N, self._middles())
        total_L = torch.zeros_like(self.level_L).index_add_(0, nearest_N, sample_N)
        count_L = torch.bincount(nearest_N, minlength=len(total_L))
        mean_L = torch.where(count_L > 0, total_L / count_L.clamp(min=1), self.level_L)
        self.level_L.copy_(mean_L)

    def _normalized(self, x_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Least value and width of each bucket, and its values between 0 and 1."""
        x_KG = _buckets(x_BN, self.bucket)
        low_K, span_K = _range(x_KG)
        inverse_K = torch.where(span_K > 0, 1.0 / span_K, 0.0)
        return low_K, span_K, (x_KG - low_K[:, None]).mul_(inverse_K[:, None])

    def _middles(self) -> Tensor:
        return (self.level_L[1:] + self.level_L[:-1]) / 2


def value_codec(bits: int, rounding: WeightRounding | GradientRounding, bucket: int) -> Codec:
    """Codec for values that are not kept."""
    if bits >= 16:
        return Cast("fp32" if bits == 32 else "bf16")
    if rounding == "shift":
        return Shifted(bits, bucket)
    if rounding == "learned":
        return Learned.uniform(bits, bucket)
    return Uniform(bits, bucket, scale_dtype="fp32", stochastic=rounding == "stochastic")


def is_kept(shape: torch.Size, config: ShardsConfig) -> bool:
    """Whether a parameter of this shape travels in full precision."""
    return len(shape) < 2 or shape.numel() < config.keep_below


def _buckets(x_BN: Tensor, bucket: int) -> Tensor:
    """[K, G], the last bucket filled with its first value; a bucket ends where the row does."""
    bucket = max(1, min(bucket, x_BN.shape[1]))
    missing = -x_BN.shape[1] % bucket
    if not missing:
        return x_BN.reshape(-1, bucket)
    first = x_BN[0, x_BN.shape[1] // bucket * bucket]
    x_BN = F.pad(x_BN, (0, missing))
    x_BN[0, x_BN.shape[1] - missing :] = first
    return x_BN.view(-1, bucket)


def _range(x_KG: Tensor) -> tuple[Tensor, Tensor]:
    """Least value and width of each bucket; NaN where not all its values are finite."""
    low_K, high_K = torch.aminmax(x_KG, dim=1)
    span_K = high_K - low_K
    span_K = torch.where(span_K.isfinite(), span_K, torch.nan)
    return low_K, span_K
