"""Uniform b-bit quantization with a zero level (mid-tread) and one scale per group of values.

All 2^b codes are used: q in [-2^(b-1), 2^(b-1) - 1], and the sign of a group's scale decides which
of its extremes gets the longer side. Rounding is to nearest, ties to even; stochastic rounding is
unbiased and keyed (`Noise`). The byte layout is in `kernels/__init__.py`: scales, then codes.

Axes: B rows, N values per row, W bytes per row, T tokens, D channels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.wire.codec import Noise
from pipeline.wire.kernels import Backend, load_kernels

ScalePer = Literal["token", "channel", "tensor"] | int

_SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Uniform:
    """`bits` per value; one scale per token, channel, row ("tensor") or `scale_per` values.

    `width` is D, needed when scales are per token or per channel: a row is then T x D values,
    channels last. fp16 scales are not offered: they overflow and underflow on real activations.

    Raises:
        ValueError: bits outside 1..8, a group size below 1, a missing width, or stochastic rounding
            at 1 bit (two levels on one side of zero cannot be unbiased).
    """

    bits: int
    scale_per: ScalePer = "token"
    width: int | None = None
    scale_dtype: Literal["bf16", "fp32"] = "bf16"
    stochastic: bool = False
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits = {self.bits}: use 1 to 8")
        if isinstance(self.scale_per, int) and self.scale_per < 1:
            raise ValueError(f"scale_per = {self.scale_per}: a group holds at least 1 value")
        if self.scale_per in ("token", "channel") and not self.width:
            raise ValueError(f'scale_per = "{self.scale_per}" needs the width of a token')
        if self.stochastic and self.bits == 1:
            raise ValueError("stochastic rounding needs bits >= 2: 1 bit cannot be unbiased")

    @property
    def codec_id(self) -> int:
        """Number of the codec in message headers."""
        return 16

    def nbytes(self, numel: int) -> int:
        """Exact bytes of a row: b * ceil(N / 8) of codes and one scale per group."""
        return self._scale_nbytes(numel) + self.bits * -(-numel // 8)

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> None:
        """Write the rows' bytes; `noise` is needed if and only if `stochastic`.

        Raises:
            ValueError: stochastic without noise.
        """
        if self.stochastic and noise is None:
            raise ValueError("stochastic rounding needs noise: pass the key of the run and place")
        rows, numel = x_BN.shape
        group, split = self._group(numel), self._scale_nbytes(numel)
        scale_BK = self._new_scales(rows, numel, x_BN.device)
        payload_BP = wire_BW.new_empty(rows, wire_BW.shape[1] - split)
        load_kernels(self.backend).quantize(
            self._to_groups(x_BN),
            payload_BP,
            scale_BK,
            bits=self.bits,
            group=group,
            noise=noise if self.stochastic else None,
        )
        wire_BW[:, :split] = scale_BK.view(torch.uint8)
        wire_BW[:, split:] = payload_BP
        if seen_BN is not None:
            self._dequantize(payload_BP, scale_BK, seen_BN)

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        """Write the rows' values."""
        rows, numel = out_BN.shape
        split = self._scale_nbytes(numel)
        scale_BK = self._new_scales(rows, numel, out_BN.device)
        scale_BK.view(torch.uint8).copy_(wire_BW[:, :split])
        self._dequantize(wire_BW[:, split:], scale_BK, out_BN)

    def _dequantize(self, payload_BP: Tensor, scale_BK: Tensor, out_BN: Tensor) -> None:
        kernels, rows = load_kernels(self.backend), out_BN.shape[0]
        group = self._group(out_BN.shape[1])
        if self.scale_per != "channel":
            kernels.dequantize(payload_BP, scale_BK, out_BN, bits=self.bits, group=group)
            return
        turned_BN = torch.empty_like(out_BN)
        kernels.dequantize(payload_BP, scale_BK, turned_BN, bits=self.bits, group=group)
        out_BN.copy_(turned_BN.view(rows, -1, group).transpose(1, 2).flatten(1))

    def _to_groups(self, x_BN: Tensor) -> Tensor:
        if self.scale_per != "channel":
            return x_BN
        assert self.width is not None
        return x_BN.reshape(x_BN.shape[0], -1, self.width).transpose(1, 2).flatten(1)

    def _new_scales(self, rows: int, numel: int, device: torch.device) -> Tensor:
        groups = -(-numel // self._group(numel))
        return torch.empty(rows, groups, dtype=_SCALE_DTYPES[self.scale_dtype], device=device)

    def _scale_nbytes(self, numel: int) -> int:
        return -(-numel // self._group(numel)) * _SCALE_DTYPES[self.scale_dtype].itemsize

    def _group(self, numel: int) -> int:
        if isinstance(self.scale_per, int):
            return self.scale_per
        if self.scale_per == "tensor":
            return max(numel, 1)
        assert self.width is not None
        return self.width if self.scale_per == "token" else max(numel // self.width, 1)
