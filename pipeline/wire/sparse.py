"""Top-k of a vector as bytes: which values were kept, and the kept values quantized.

CocktailSGD (Wang et al., ICML 2023) sends the largest share of the candidates that a random subset
leaves. A message of n candidates holds, in order:

    mask length, codes length   two little-endian 32-bit numbers
    mask                        ceil(n / 8) bytes before coding; absent if all values are kept
    scales                      one bf16 per group of kept values; absent at 16 and 32 bits
    codes                       `Uniform`'s codes of the kept values, or the values in bf16 or fp32

Mask and codes are entropy-coded, each on its own and only if that makes it shorter, as its length
shows. zstd's Huffman coder comes within 2 % of the entropy of a random mask (0.722 bits a candidate
at a fifth) and finds more in masks that are clustered. One that marks less than a sixteenth may be
shorter as gaps (`coding/gaps.py`). A coded mask begins with a byte that says how: 0 is zstd, 1 is
gaps.

Axes: n candidates, k kept values, M mask bytes, W bytes of a message.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.coding import gaps
from thinpipe.pipeline.wire.coding.entropy import CodingError, compress, expand
from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.sparse import SparseKernels
from thinpipe.pipeline.wire.uniform import Uniform

_HEAD, _LENGTH = 8, torch.int32
_GAPS_BELOW = Fraction(1, 16)
"""The share of marked places from which on zstd is shorter: of a random mask with 1.5 % it makes
12.4 bits per mark where the entropy is 7.5, of one with 20 % what it should."""


@dataclass(frozen=True)
class SparseCodec:
    """Keeps `fraction` of the values by magnitude, at `bits` bits each.

    1 to 8 bits quantize with one bf16 scale per `group` kept values; 16 and 32 send bf16 and fp32.
    At least one value of a vector is kept, so a NaN or infinity always reaches the peer: its group
    decodes to NaN. Equal inputs give equal bytes on any device.

    Raises:
        ValueError: a fraction outside (0, 1], other bits, or a group below 1.
    """

    fraction: float | Fraction
    bits: int
    group: int = 128
    codec_id = 48

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction = {self.fraction}: use a number in (0, 1]")
        if not (1 <= self.bits <= 8 or self.bits in (16, 32)):
            raise ValueError(f"bits = {self.bits}: use 1 to 8, or 16 (bf16) or 32 (fp32)")
        if self.group < 1:
            raise ValueError(f"group = {self.group}: a scale is for at least 1 value")

    def kept(self, numel: int) -> int:
        """How many of `numel` values a message holds: the nearest count, but at least one."""
        return min(numel, max(1, round(self._share * numel)))

    def capacity(self, numel: int) -> int:
        return _HEAD + sum(self._sizes(numel))

    def encode(
        self, x_n: Tensor, wire: Tensor, seen_n: Tensor | None = None, *, noise: Noise | None = None
    ) -> int:
        """Write the message of one row, or vector, to the start of `wire` and return its length.

        `seen_n` receives what the peer will decode, bit for bit: zero where nothing was kept. The
        vector has any floating dtype, `wire` (uint8) any device. Deterministic, so `noise` is not
        used.

        Raises:
            ValueError: `seen_n` is of another size.
        """
        x_n, wire = x_n.detach().flatten().float(), wire.view(-1)
        if seen_n is not None and seen_n.numel() != x_n.numel():
            raise ValueError(f"seen has {seen_n.numel()} values: the vector has {x_n.numel()}")
        sizes, seen_n = self._sizes(x_n.numel()), None if seen_n is None else seen_n.view(-1)
        mask_M = torch.empty(sizes.mask, dtype=torch.uint8, device=x_n.device)
        kept_1k = torch.empty(1, self.kept(x_n.numel()), device=x_n.device)
        if not sizes.mask:
            kept_1k[0] = x_n
        elif seen_n is None or seen_n.dtype != x_n.dtype or seen_n.data_ptr() == x_n.data_ptr():
            self._kernels(x_n).select(x_n, mask_M, kept_1k[0])
        else:  # in seen, which is not written yet: that saves an allocation
            self._kernels(x_n).select(x_n, mask_M, kept_1k[0], seen_n)
        values = mask_M.new_empty(1, sizes.scales + sizes.codes)
        self._values.encode(kept_1k, values, None if seen_n is None else kept_1k, noise=None)
        if seen_n is not None:
            self._place(mask_M, kept_1k[0], seen_n)
        scales, codes = torch.split(values[0].cpu(), list(sizes[1:]))
        return self._write(mask_M.cpu(), scales, codes, wire)

    def decode(self, wire: Tensor, out_n: Tensor) -> None:
        """Write the message's values to `out_n` (any floating dtype), and zero elsewhere.

        `wire` may be longer than the message.
        """
        out_n = out_n.view(-1)
        self._place(*self._read(wire, out_n), out_n)

    def decode_add(self, wire: Tensor, sum_n: Tensor) -> None:
        """Add the message's values to `sum_n` (fp32, contiguous).

        Raises:
            ValueError: `sum_n` is not fp32 and contiguous.
            CodingError: the bytes are damaged, or those of another number of values.
        """
        sum_n = sum_n.view(-1)
        if sum_n.dtype != torch.float32 or not sum_n.is_contiguous():
            raise ValueError(f"a sum in {sum_n.dtype}: use a contiguous one in torch.float32")
        mask_M, kept_k = self._read(wire, sum_n)
        if mask_M.numel():
            self._kernels(sum_n).place_add(mask_M, kept_k, sum_n)
        else:
            sum_n += kept_k

    @cached_property
    def _share(self) -> Fraction:
        return Fraction(self.fraction).limit_denominator(10**6)  # as it was written: 0.1 is 1 / 10

    @cached_property
    def _values(self) -> Cast | Uniform:
        if self.bits > 8:
            return Cast("bf16" if self.bits == 16 else "fp32")
        return Uniform(self.bits, self.group)

    def _kernels(self, x_n: Tensor) -> SparseKernels:
        return cast(SparseKernels, load("sparse", device=x_n.device))

    def _sizes(self, numel: int) -> "_Sizes":
        kept = self.kept(numel)
        scales = 2 * -(-kept // self.group) if self.bits <= 8 else 0
        mask = 0 if kept == numel else -(-numel // 8)
        return _Sizes(mask, scales, self._values.capacity(kept) - scales)

    def _place(self, mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
        if not mask_M.numel():
            out_n.copy_(kept_k)
        elif out_n.dtype == torch.float32 and out_n.is_contiguous():
            self._kernels(out_n).place(mask_M, kept_k, out_n.detach())
        else:
            into_n = torch.empty(out_n.shape, device=out_n.device)
            self._kernels(into_n).place(mask_M, kept_k, into_n)
            out_n.copy_(into_n)

    def _write(self, mask_M: Tensor, scales: Tensor, codes: Tensor, wire: Tensor) -> int:
        end_mask = _HEAD + self._put_mask(mask_M, wire[_HEAD:])
        end_scales = end_mask + scales.numel()
        wire[end_mask:end_scales] = scales
        length = compress(codes, wire[end_scales:])
        if length is None:
            length = codes.numel()
            wire[end_scales : end_scales + length] = codes
        wire[:_HEAD] = torch.tensor([end_mask - _HEAD, length], dtype=_LENGTH).view(torch.uint8)
        return end_scales + length

    def _put_mask(self, mask_M: Tensor, wire: Tensor) -> int:
        best = mask_M
        ways = (compress, gaps.encode) if self._share < _GAPS_BELOW else (compress,)
        for kind, way in enumerate(ways):
            form = torch.empty(1 + mask_M.numel(), dtype=torch.uint8)
            form[0] = kind
            length = way(mask_M, form[1:])
            if length is not None and 1 + length < best.numel():
                best = form[: 1 + length]
        wire[: best.numel()] = best
        return best.numel()

    def _read(self, wire: Tensor, out_n: Tensor) -> tuple[Tensor, Tensor]:
        """Mask, empty if all values are kept, and the kept values, on the device of `out_n`."""
        sizes, wire = self._sizes(out_n.numel()), wire.view(-1).cpu()
        mask_length, codes_length = _lengths(wire, sizes)
        lengths = [_HEAD, mask_length, sizes.scales, codes_length]
        _, mask, scales, codes = torch.split(wire[: sum(lengths)], lengths)
        mask_M = torch.empty(sizes.mask, dtype=torch.uint8)
        values_1W = torch.empty(1, sizes.scales + sizes.codes, dtype=torch.uint8)
        kept_1k = torch.empty(1, self.kept(out_n.numel()), device=out_n.device)
        _get_mask(mask, kept_1k.numel(), mask_M)
        _check_count(mask_M, out_n.numel(), kept_1k.numel())
        values_1W[0, : sizes.scales] = scales
        if codes_length == sizes.codes:
            values_1W[0, sizes.scales :] = codes
        else:
            expand(codes, values_1W[0, sizes.scales :])
        self._values.decode(values_1W.to(out_n.device), kept_1k)
        return mask_M.to(out_n.device), kept_1k[0]


class _Sizes(NamedTuple):
    """Bytes of the parts of a message, before coding."""

    mask: int
    scales: int
    codes: int


def _lengths(wire: Tensor, sizes: _Sizes) -> tuple[int, int]:
    mask, codes = (0, 0) if wire.numel() < _HEAD else wire[:_HEAD].clone().view(_LENGTH).tolist()
    fits = 0 <= mask <= sizes.mask and 0 <= codes <= sizes.codes
    if not fits or wire.numel() < _HEAD + mask + sizes.scales + codes:
        raise CodingError(
            f"a sparse message of {wire.numel()} bytes has lengths {mask} and {codes}; "
            f"mask, scales and codes take {tuple(sizes)} bytes"
        )
    return mask, codes


def _get_mask(part: Tensor, marked: int, mask_M: Tensor) -> None:
    if part.numel() == mask_M.numel():
        mask_M.copy_(part)
    elif part.numel() and part[0] == 0:
        expand(part[1:], mask_M)
    elif part.numel() and part[0] == 1:
        gaps.decode(part[1:], marked, mask_M)
    else:
        raise CodingError(f"a coded mask begins with {part[:1].tolist()}, expected 0 or 1")


def _check_count(mask_M: Tensor, numel: int, kept: int) -> None:
    """A wrong mask would place values outside the vector."""
    if not mask_M.numel():
        return
    count, beyond = int(np.bitwise_count(mask_M.numpy()).sum()), -numel % 8
    if count != kept or int(mask_M[-1]) >> (8 - beyond):
        raise CodingError(f"a mask of {numel} values marks {count}, expected {kept} among them")
