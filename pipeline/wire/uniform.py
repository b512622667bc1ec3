"""Uniform b-bit quantization with a zero level (mid-tread) and one scale per group of values.

All 2^b codes are used: q in [-2^(b-1), 2^(b-1) - 1], and the sign of a group's scale decides which
of its extremes gets the longer side. Rounding is to nearest, ties to even; stochastic rounding is
unbiased and keyed (`Noise`). The byte layout is in `kernels/__init__.py`: scales, then codes.

Axes: B rows, N values per row, W bytes per row.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes, KernelSet, load_kernels

_SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Uniform:
    """`bits` per value; one scale per `group` values, such as the channels of a token.

    fp16 scales are not offered: they overflow and underflow on real activations.

    Raises:
        ValueError: bits outside 1..8, a group size below 1, or stochastic rounding at 1 bit: two
            levels on one side of zero cannot be unbiased.
    """

    bits: int
    group: int
    scale_dtype: Literal["bf16", "fp32"] = "bf16"
    stochastic: bool = False
    codec_id = 16

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits = {self.bits}: use 1 to 8")
        if self.group < 1:
            raise ValueError(f"group = {self.group}: a scale is for at least 1 value")
        if self.stochastic and self.bits == 1:
            raise ValueError("stochastic rounding needs bits >= 2: 1 bit cannot be unbiased")

    def capacity(self, numel: int) -> int:
        """Exact bytes of a row: b * ceil(N / 8) of codes and one scale per group."""
        return self.scale_nbytes(numel) + self.bits * -(-numel // 8)

    def scale_nbytes(self, numel: int) -> int:
        """Bytes of a row's scales; codes follow."""
        return -(-numel // self.group) * _SCALE_DTYPES[self.scale_dtype].itemsize

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        """Write the rows' bytes; `noise` is needed if and only if `stochastic`.

        Raises:
            ValueError: stochastic without noise.
        """
        codes, noise = self._new_codes(x_BN, wire_BW), self._used(noise)
        self._kernels(x_BN).quantize(x_BN, codes, noise=noise)
        _write_scales(codes, wire_BW)
        if seen_BN is not None:
            self._dequantize(codes, seen_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        self._dequantize(self._received(wire_BW, out_BN), out_BN)

    def encode_change(
        self, x_BN: Tensor, cached: Cached, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        codes, noise = self._new_codes(x_BN, wire_BW), self._used(noise)
        finite_B = self._kernels(x_BN).delta_encode(x_BN, cached, codes, noise=noise)
        _write_scales(codes, wire_BW)
        return finite_B

    def decode_change(self, wire_BW: Tensor, cached: Cached, out_BN: Tensor) -> Tensor:
        codes = self._received(wire_BW, out_BN)
        return self._kernels(out_BN).delta_decode(codes, cached, out_BN)

    def _used(self, noise: Noise | None) -> Noise | None:
        if self.stochastic and noise is None:
            raise ValueError("stochastic rounding needs noise: pass the key of the run and place")
        return noise if self.stochastic else None

    def _kernels(self, x_BN: Tensor) -> KernelSet:
        return load_kernels("auto", x_BN.device)

    def _new_codes(self, x_BN: Tensor, wire_BW: Tensor) -> Codes:
        """Payload in place; scales in their own buffer: in the message they start at any byte."""
        rows, numel = x_BN.shape
        shape, dtype = (rows, -(-numel // self.group)), _SCALE_DTYPES[self.scale_dtype]
        scale_BK = torch.empty(shape, dtype=dtype, device=x_BN.device)
        return Codes(wire_BW[:, self.scale_nbytes(numel) :], scale_BK, self.bits, self.group)

    def _received(self, wire_BW: Tensor, out_BN: Tensor) -> Codes:
        codes = self._new_codes(out_BN, wire_BW)
        codes.scale_BK.view(torch.uint8).copy_(wire_BW[:, : self.scale_nbytes(out_BN.shape[1])])
        return codes

    def _dequantize(self, codes: Codes, out_BN: Tensor) -> None:
        self._kernels(out_BN).dequantize(codes, out_BN)


def _write_scales(codes: Codes, wire_BW: Tensor) -> None:
    scale_BS = codes.scale_BK.view(torch.uint8)
    wire_BW[:, : scale_BS.shape[1]] = scale_BS
