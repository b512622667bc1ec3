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
"""

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached, Noise

if TYPE_CHECKING:
    from thinpipe.pipeline.wire.kernels.cpu import uniform as cpu
    from thinpipe.pipeline.wire.kernels.gpu import uniform as gpu
    from thinpipe.pipeline.wire.kernels.reference import uniform as reference

Backend = Literal["auto", "reference", "numba", "triton"]

TILE = 64
"""Values of a tile (`hadamard.py`)."""
_FOLDERS = {"reference": "reference", "numba": "cpu", "triton": "gpu"}
_AUTO: dict[str, Backend] = {"cuda": "triton", "cpu": "numba"}
_TRITON = ("uniform", "hadamard")


class Codes(NamedTuple):
    """Quantized rows: an output of the quantizing kernels, which fill the tensors, or an input.

    Rows are contiguous, at any distance from each other. Scales are bf16 or fp32. K is
    ceil(N / group) and P is bits * ceil(N / 8).
    """

    payload_BP: Tensor
    scale_BK: Tensor
    bits: int
    group: int


class KernelSet(Protocol):
    """What every backend offers; all outputs are preallocated and fully written.

    Axes: B rows, N values. Memories (`cached`) are fp32 or bf16, values are quickest in these.
    `x_BN` and `out_BN` may have any strides, rows of memories are contiguous. Rounds stochastically
    if `noise` is given.
    """

    def quantize(self, x_BN: Tensor, codes: Codes, *, noise: Noise | None) -> None:
        """Fill `codes`."""

    def dequantize(self, codes: Codes, out_BN: Tensor) -> None:
        """Write the values that codes and scales stand for."""

    def delta_encode(
        self, x_BN: Tensor, cached: Cached, codes: Codes, *, noise: Noise | None
    ) -> Tensor:
        """Quantize x - old and write old + change, in the memory's format, to the fresh rows.

        These may be the old ones. Returns, bool [B], whether all of a fresh row is finite.
        """

    def delta_decode(self, codes: Codes, cached: Cached, out_BN: Tensor) -> Tensor:
        """The receiver's side: also writes old + change, not rounded to memory, to `out_BN`."""


if TYPE_CHECKING:  # a backend that drifts fails the type check
    _backends: list[KernelSet] = [cpu, gpu, reference]


def with_contiguous_rows(t_BN: Tensor) -> Tensor:
    """The tensor itself if the values of a row lie side by side, else a copy in which they do."""
    return t_BN if t_BN.stride(1) == 1 else t_BN.contiguous()


def load(name: str, backend: Backend = "auto", device: torch.device | None = None) -> Any:
    """The module `name` of a backend; each has the functions of that name's contract.

    "auto" is triton on CUDA, where there is one, numba on CPUs (the default) and else the
    reference.

    Raises:
        ImportError: the backend is not installed, or has no such kernels.
    """
    if backend == "auto":
        backend = _AUTO.get("cpu" if device is None else device.type, "reference")
        backend = "reference" if backend == "triton" and name not in _TRITON else backend
    return _module(f"{_FOLDERS[backend]}.{name}")


def load_kernels(backend: Backend, device: torch.device) -> KernelSet:
    """The kernels of uniform quantization."""
    return cast(KernelSet, load("uniform", backend, device))


@functools.cache
def _module(name: str) -> ModuleType:
    """A module of this package, which is looked for once: codecs ask at every message."""
    return importlib.import_module(f"thinpipe.pipeline.wire.kernels.{name}")
