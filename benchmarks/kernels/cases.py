"""What `benchmarks.kernels` runs: a kernel on its buffers, and the floor that moves the same bytes.

Axes: B rows (one per thread), N values per row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import floors
from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Codes, KernelSet, load_kernels

GROUP = 128
CPU = torch.device("cpu")
Work = Callable[[int], object]  # runs one row


@dataclass(frozen=True)
class Case:
    """A kernel call: what it does to row `b`, its floor, and the bytes it must move per value."""

    kernel: str
    bits: int
    rounding: str
    nbytes: float
    floor: Work
    run: Callable[[KernelSet], Work]


class Buffers:
    """Inputs and outputs of one size, one row per thread."""

    def __init__(self, rows: int, numel: int, bits: int) -> None:
        """Fill the inputs with the values and memories of a sample that changed a little."""
        self.rows, self.numel, self.bits = rows, numel, bits
        generator = torch.Generator().manual_seed(0)
        shape, kernels = (rows, numel), load_kernels("numba", CPU)
        self.x = torch.randn(shape, generator=generator)
        self.memory = (self.x + 0.1 * torch.randn(shape, generator=generator)).bfloat16()
        self.fresh, self.out = torch.zeros_like(self.memory), torch.zeros(shape)
        self.codes = self._room(bits)
        kernels.quantize(self.x, self.codes, noise=None)

    def _room(self, bits: int) -> Codes:
        payload = torch.zeros(self.rows, bits * self.numel // 8, dtype=torch.uint8)
        scale = torch.zeros(self.rows, self.numel // GROUP, dtype=torch.bfloat16)
        return Codes(payload, scale, bits, GROUP)

    def outputs(self) -> list[Tensor]:
        """Copies of everything that kernels write."""
        tensors = (*self.codes[:2], self.fresh, self.out)
        return [tensor.clone() for tensor in tensors]


def row_of(codes: Codes, b: int) -> Codes:
    """One row of codes."""
    payload, scale, bits, group = codes
    return Codes(payload[b : b + 1], scale[b : b + 1], bits, group)


def words(tensor: Tensor) -> Any:
    """A tensor's rows as unsigned integers of its width."""
    kind = {4: torch.uint32, 2: torch.uint16, 1: torch.uint8}[tensor.itemsize]
    return tensor.view(kind).numpy()


def cases(buffers: Buffers) -> Iterator[Case]:
    """Every kernel at the buffers' size and bits."""
    yield from _quantizing(buffers)
    yield from _dequantizing(buffers)


def _noise(rounding: str) -> Noise | None:
    return Noise(1, 2, torch.tensor([3])) if rounding == "stochastic" else None


def _quantizing(buffers: Buffers) -> Iterator[Case]:
    bits, code, codes = buffers.bits, buffers.bits / 8, buffers.codes
    tensors = (buffers.x, buffers.memory, buffers.fresh, codes.payload_BP)
    x, m, f, p = (words(tensor) for tensor in tensors)

    def row(b: int) -> tuple[Tensor, Tensor, Codes, Tensor]:
        part = slice(b, b + 1)
        return buffers.x[part], buffers.memory[part], row_of(codes, b), buffers.fresh[part]

    def quantize(noise: Noise | None, rate: float | None, kernels: KernelSet) -> Work:
        return lambda b: kernels.quantize(row(b)[0], row(b)[2], noise=noise, rate=rate)

    def delta_encode(noise: Noise | None, rate: float | None, kernels: KernelSet) -> Work:
        return lambda b: kernels.delta_encode(*row(b), noise=noise, rate=rate)

    for rounding in ("nearest", "stochastic", "rate"):
        noise, rate = _noise(rounding), 1.0 if rounding == "rate" else None
        if (bits == 1 and noise) or (rate and bits != 4):
            continue
        yield Case(
            *("quantize", bits, rounding, 4 + code),
            floor=lambda b: floors.read_and_pack(x[b], p[b], bits),
            run=partial(quantize, noise, rate),
        )
        yield Case(
            *("delta_encode", bits, rounding, 8 + code),
            floor=lambda b: floors.update(x[b], m[b], f[b], p[b], bits),
            run=partial(delta_encode, noise, rate),
        )


def _dequantizing(buffers: Buffers) -> Iterator[Case]:
    bits, code, codes = buffers.bits, buffers.bits / 8, buffers.codes
    tensors = (buffers.memory, buffers.fresh, buffers.out, codes.payload_BP)
    m, f, o, p = (words(tensor) for tensor in tensors)

    def row(b: int) -> tuple[Codes, Tensor, Tensor, Tensor]:
        kept, part = (buffers.memory, buffers.fresh, buffers.out), slice(b, b + 1)
        memory, fresh, out = (tensor[part] for tensor in kept)
        return row_of(codes, b), memory, fresh, out

    yield Case(
        *("dequantize", bits, "nearest", 4 + code),
        floor=lambda b: floors.unpack(p[b], o[b], bits),
        run=lambda k: lambda b: k.dequantize(row(b)[0], row(b)[3]),
    )
    yield Case(
        *("delta_decode", bits, "nearest", 8 + code),
        floor=lambda b: floors.apply(p[b], m[b], f[b], o[b], bits),
        run=lambda k: lambda b: k.delta_decode(*row(b)),
    )
