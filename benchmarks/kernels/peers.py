"""What others offer for the same work, each behind an adapter; one that is missing is left out.

None of them has AQ-SGD's difference and memory, so they are compared as quantizers only. They keep
their own layouts and scales; groups are of 128 values where the peer has groups.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.cases import GROUP

Made = Callable[[], object]


class Peer(NamedTuple):
    """A peer's call on prepared inputs, and the case of ours that does the same work."""

    name: str
    kernel: str
    bits: int
    call: Made


def peers(x_BN: Tensor, bits: int) -> Iterator[Peer]:
    """Everything installed that quantizes to `bits`."""
    x_KG = x_BN.view(-1, GROUP)
    yield from _fbgemm(x_KG, bits)
    for name, adapter in (
        ("bitsandbytes", _bitsandbytes),
        ("optimum.quanto", _quanto),
        ("torchao", _torchao),
    ):
        if _installed(name):
            yield from adapter(x_KG, bits)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _fbgemm(x_KG: Tensor, bits: int) -> Iterator[Peer]:
    """FBGEMM's embedding quantizers, which ship with torch; scales are fp16 (8 bits: fp32)."""
    name = {2: "2bit", 4: "4bit", 8: "byte"}.get(bits)
    if name is None:
        return
    pack: Any = getattr(torch.ops.quantized, f"embedding_bag_{name}_prepack")
    unpack: Any = getattr(torch.ops.quantized, f"embedding_bag_{name}_unpack")
    packed = pack(x_KG)
    yield Peer("fbgemm", "quantize", bits, lambda: pack(x_KG))
    yield Peer("fbgemm", "dequantize", bits, lambda: unpack(packed))


def _bitsandbytes(x_KG: Tensor, bits: int) -> Iterator[Peer]:
    """nf4 at 4 bits, the dynamic 8-bit type in blocks of 256."""
    import bitsandbytes.functional as bnb

    if bits == 4:
        packed, state = bnb.quantize_4bit(x_KG, blocksize=GROUP, quant_type="nf4")
        yield Peer(
            *("bitsandbytes", "quantize", bits),
            lambda: bnb.quantize_4bit(x_KG, blocksize=GROUP, quant_type="nf4"),
        )
        yield Peer("bitsandbytes", "dequantize", bits, lambda: bnb.dequantize_4bit(packed, state))
    if bits == 8:
        codes, kept = bnb.quantize_blockwise(x_KG, blocksize=256)
        yield Peer(
            "bitsandbytes", "quantize", bits, lambda: bnb.quantize_blockwise(x_KG, blocksize=256)
        )
        yield Peer(
            "bitsandbytes", "dequantize", bits, lambda: bnb.dequantize_blockwise(codes, kept)
        )


def _quanto(x_KG: Tensor, bits: int) -> Iterator[Peer]:
    """Weights at 2 and 4 bits, scale and shift from the extremes, packed."""
    from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight

    kind = {2: qint2, 4: qint4}.get(bits)
    if kind is None:
        return

    def quantize() -> Any:
        scale, shift = MaxOptimizer()(x_KG, qtype=kind, axis=0, group_size=GROUP)
        return quantize_weight(x_KG, qtype=kind, axis=0, scale=scale, shift=shift, group_size=GROUP)

    packed = quantize()
    yield Peer("quanto", "quantize", bits, quantize)
    yield Peer("quanto", "dequantize", bits, lambda: packed.dequantize())


def _torchao(x_KG: Tensor, bits: int) -> Iterator[Peer]:
    """Affine quantization; one byte per value, it does not pack."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    top, shape = 2**bits - 1, (1, GROUP)

    def quantize() -> tuple[Tensor, Tensor, Tensor]:
        kind = MappingType.ASYMMETRIC
        scale, zero = choose_qparams_affine(x_KG, kind, shape, torch.uint8, 0, top)
        return quantize_affine(x_KG, shape, scale, zero, torch.uint8, 0, top), scale, zero

    codes, scale, zero = quantize()
    yield Peer("torchao", "quantize", bits, quantize)
    yield Peer(
        *("torchao", "dequantize", bits),
        lambda: dequantize_affine(codes, shape, scale, zero, torch.uint8, 0, top),
    )
