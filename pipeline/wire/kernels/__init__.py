"""The KernelSet contract and the choice of a backend.

Layout of a row of N values at b bits (block-planar). The row is cut into blocks of 1024 values; the
last block may be shorter and is padded to a multiple of 8 values. A block is 8 planes of L lanes
(L = 128, in the last block ceil(rest / 8)): value e of a block is in plane e // L, lane e % L. The
b-bit codes are split into fields of 8, 4, 2 and 1 bits, widest first and from the low bits up (6 =
4 + 2), and a w-bit field of a block becomes w rows of L bytes: byte row r holds planes r, r + w,
r + 2w, ..., each shifted by w more bits. So a row takes b * ceil(N / 8) bytes for every b, with no
bit stream and no shuffle.

Codes are offset binary: code = q + 2^(b-1), value = q * scale, q in [-2^(b-1), 2^(b-1) - 1]. The
sign of the scale turns the longer side of this range towards the group's largest magnitude. With
bf16 scales the product is exact in fp32, whatever the hardware fuses.

Random numbers: Philox4x32-10 (Salmon et al., SC'11), key = `Noise.key`, counter = (128 * block +
lane, row number low, row number high, step); the four words give 8 numbers of 16 bits, low half
first: one per plane. A value is rounded to 1/65536 of a step, then up if its random number carries:
q = (rint(65536 * x / scale) + random) >> 16.

Variable rate: with `rate` = c, a group's step is c * rms, positive and rounded up to the scale's
format, and values beyond the levels are clipped before they are rounded. The squares are added in
fp32, value e of a group to sum e % 64, in order; then sums i and i + 32 are added, i and i + 16,
down to one. rms is sqrt(sum / values); where the sum overflows the group counts as not finite.

Block ranges: a row can be worked on in parts, blocks [first, last), in any order and by any number
of threads: the parts' bytes are those of the whole. A group belongs to the part it begins in, which
writes its scale. Where groups lie across parts, `fresh_BN` must not be `memory_BN`.
"""

import importlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise

BLOCK = 1024
PLANES = 8

Backend = Literal["auto", "reference", "numba", "triton"]

_MODULES = {"reference": "reference.uniform", "numba": "cpu.uniform", "triton": "gpu.uniform"}


class Codes(NamedTuple):
    """Quantized rows: an output of the quantizing kernels, which fill the tensors, or an input.

    Rows are contiguous, at any distance from each other. Scales are bf16 or fp32. K is
    ceil(N / group) and P is bits * ceil(N / 8).
    """

    payload_BP: Tensor
    scale_BK: Tensor
    bits: int
    group: int


class RowKernels(Protocol):
    """Functions on one set of codes; all outputs are preallocated and fully written.

    Axes: B rows, N values. Values are fp32, bf16 or fp16; so are memories. `x_BN` and `out_BN` may
    have any strides, rows of memories are contiguous. Rounds stochastically if `noise` is given.
    `blocks` limits the work to a part of each row.
    """

    def quantize(
        self,
        x_BN: Tensor,
        codes: Codes,
        *,
        noise: Noise | None,
        rate: float | None = None,
        blocks: range | None = None,
    ) -> None:
        """Fill `codes`."""

    def dequantize(self, codes: Codes, out_BN: Tensor, *, blocks: range | None = None) -> None:
        """Write the values that codes and scales stand for."""

    def delta_encode(
        self,
        x_BN: Tensor,
        memory_BN: Tensor,
        codes: Codes,
        fresh_BN: Tensor,
        *,
        noise: Noise | None,
        rate: float | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """Quantize x - memory and write memory + change, in the memory's format, to `fresh_BN`.

        `fresh_BN` may be `memory_BN`. Returns, bool [B], whether all of a row's new memory is
        finite.
        """

    def delta_decode(
        self,
        codes: Codes,
        memory_BN: Tensor,
        fresh_BN: Tensor,
        out_BN: Tensor,
        *,
        blocks: range | None = None,
    ) -> Tensor:
        """The receiver's side: also writes memory + change, not rounded to memory, to `out_BN`."""


class KernelSet(RowKernels, Protocol):
    """What every backend offers: also functions that combine several codes of a row.

    These take only parts that begin and end at multiples of `unit_blocks`.
    """

    def packed_delta_encode(
        self,
        x_BN: Tensor,
        memory: Codes,
        codes: Codes,
        fresh: Codes,
        *,
        noise: Noise | None,
        rate: float | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """`delta_encode` on a memory that is itself quantized, to nearest.

        The same as to dequantize `memory` to fp32, `delta_encode`, and quantize to `fresh`, which
        must not be `memory`. Returns whether all of a row's memory + change is finite.
        """

    def packed_delta_decode(
        self,
        codes: Codes,
        memory: Codes,
        fresh: Codes,
        out_BN: Tensor,
        *,
        blocks: range | None = None,
    ) -> Tensor:
        """The receiver's side of `packed_delta_encode`."""

    def mean(
        self,
        shards: Sequence[Codes],
        codes: Codes,
        residual_BN: Tensor,
        *,
        noise: Noise | None,
        blocks: range | None = None,
    ) -> None:
        """Quantize the mean of `shards` plus `residual_BN` (fp32), which becomes what was lost.

        target = fp32(1 / n) * (shards[0] + shards[1] + ...) + residual, added in fp32 in this
        order; codes = quantize(target); residual = target - dequantize(codes).
        """


def check_blocks(blocks: range | None, numel: int, *, unit: int = 1) -> range:
    """Return the range, by default all blocks of a row.

    Raises:
        ValueError: it is not inside the row, or begins or ends between multiples of `unit`.
    """
    count = -(-numel // BLOCK)
    if blocks is None:
        return range(count)
    inside = 0 <= blocks.start <= blocks.stop <= count and blocks.step == 1
    if not inside:
        raise ValueError(f"blocks = {blocks}: a row of {numel} values has blocks 0 to {count}")
    if blocks.start % unit or (blocks.stop % unit and blocks.stop != count):
        raise ValueError(
            f"blocks = {blocks}: groups and blocks meet every {unit} blocks; begin and end there"
        )
    return blocks


def with_contiguous_rows(t_BN: Tensor) -> Tensor:
    """The tensor itself if the values of a row lie side by side, else a copy in which they do."""
    return t_BN if t_BN.stride(1) == 1 else t_BN.contiguous()


class Part(NamedTuple):
    """Where some blocks of a row lie: their values, payload bytes and scales (by number)."""

    values: slice
    payload: slice
    scales: slice


def part_of(blocks: range | None, numel: int, *, bits: int, group: int) -> Part:
    """What belongs to a part of a row; raises what `check_blocks` raises."""
    part = check_blocks(blocks, numel)
    first, last = part.start * BLOCK, min(part.stop * BLOCK, numel)
    lanes = BLOCK // PLANES
    return Part(
        slice(first, last),
        slice(
            part.start * lanes * bits, part.start * lanes * bits + bits * -(-(last - first) // 8)
        ),
        slice(-(-first // group), -(-last // group)),
    )


def unit_blocks(numel: int, *groups: int) -> int:
    """The fewest blocks after which a block and groups of all these sizes begin; at most a row."""
    return max(1, min(math.lcm(BLOCK, *groups) // BLOCK, -(-numel // BLOCK)))


def load_kernels(backend: Backend, device: torch.device) -> KernelSet:
    """Return a backend's functions; "auto" is triton on CUDA, numba on CPUs, else the reference.

    Raises:
        ImportError: the backend is not installed.
    """
    if backend == "auto":
        chosen = {"cuda": "triton", "cpu": "numba"}.get(device.type, "reference")
    else:
        chosen = backend
    module = importlib.import_module(f"thinpipe.pipeline.wire.kernels.{_MODULES[chosen]}")
    return cast(KernelSet, module)
