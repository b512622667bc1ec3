"""The kernels as `torch.ops.thinpipe.*`, so that `torch.compile` can hold them in one graph.

`define`, `impl` and `register_fake` cost about 10 microseconds a call; `custom_op` costs 100. The
backend is chosen by the tensors' device. Importing this module registers the operators.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Codes, KernelSet, load_kernels

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire import kernels
    from thinpipe.pipeline.wire.kernels import RowKernels

_LIBRARY = torch.library.Library("thinpipe", "DEF")  # type: ignore[no-untyped-call]
_NOISE = "int key, int step, Tensor? row_B, float? rate"
_BLOCKS = "int[]? blocks"
_SCHEMAS = {
    "quantize": "(Tensor x, Tensor(a!) payload, Tensor(b!) scale, int bits, int group, "
    f"{_NOISE}, {_BLOCKS}) -> ()",
    "dequantize": "(Tensor payload, Tensor scale, int bits, int group, Tensor(a!) out, "
    f"{_BLOCKS}) -> ()",
    "delta_encode": "(Tensor x, Tensor memory, Tensor(a!) payload, Tensor(b!) scale, int bits, "
    f"int group, Tensor(c!) fresh, {_NOISE}, {_BLOCKS}) -> Tensor",
    "delta_decode": "(Tensor payload, Tensor scale, int bits, int group, Tensor memory, "
    f"Tensor(a!) fresh, Tensor(b!) out, {_BLOCKS}) -> Tensor",
}


def quantize(
    x_BN: Tensor,
    codes: Codes,
    *,
    noise: Noise | None,
    rate: float | None = None,
    blocks: range | None = None,
) -> None:
    """Fill `codes`; see `RowKernels.quantize`."""
    torch.ops.thinpipe.quantize(x_BN, *codes, *_words(noise), rate, _ends(blocks))


def dequantize(codes: Codes, out_BN: Tensor, *, blocks: range | None = None) -> None:
    """Write the values of codes and scales; see `RowKernels.dequantize`."""
    torch.ops.thinpipe.dequantize(*codes, out_BN, _ends(blocks))


def delta_encode(
    x_BN: Tensor,
    memory_BN: Tensor,
    codes: Codes,
    fresh_BN: Tensor,
    *,
    noise: Noise | None,
    rate: float | None = None,
    blocks: range | None = None,
) -> Tensor:
    """Quantize x - memory and write memory + change; `fresh_BN` must not be `memory_BN`."""
    finite_B: Tensor = torch.ops.thinpipe.delta_encode(
        x_BN, memory_BN, *codes, fresh_BN, *_words(noise), rate, _ends(blocks)
    )
    return finite_B


def delta_decode(
    codes: Codes,
    memory_BN: Tensor,
    fresh_BN: Tensor,
    out_BN: Tensor,
    *,
    blocks: range | None = None,
) -> Tensor:
    """Write memory + change to both outputs; `fresh_BN` must not be `memory_BN`."""
    finite_B: Tensor = torch.ops.thinpipe.delta_decode(
        *codes, memory_BN, fresh_BN, out_BN, _ends(blocks)
    )
    return finite_B


def _ends(blocks: range | None) -> list[int] | None:
    return None if blocks is None else [blocks.start, blocks.stop]


def _blocks(ends: list[int] | None) -> range | None:
    return None if ends is None else range(*ends)


def _words(noise: Noise | None) -> tuple[int, int, Tensor | None]:
    """Key as a signed 64-bit integer, step, row numbers."""
    if noise is None:
        return 0, 0, None
    return (noise.key + 2**63) % 2**64 - 2**63, noise.step & 0xFFFFFFFF, noise.row_B


def _noise(key: int, step: int, row_B: Tensor | None) -> Noise | None:
    return None if row_B is None else Noise(key, step, row_B)


def _kernels(x_BN: Tensor) -> KernelSet:
    return load_kernels("auto", x_BN.device)


def _quantize(x: Tensor, payload: Tensor, scale: Tensor, *rest: Any) -> None:
    bits, group, *words, rate, ends = rest
    codes, noise = Codes(payload, scale, bits, group), _noise(*words)
    _kernels(x).quantize(x, codes, noise=noise, rate=rate, blocks=_blocks(ends))


def _dequantize(payload: Tensor, scale: Tensor, *rest: Any) -> None:
    bits, group, out, ends = rest
    _kernels(out).dequantize(Codes(payload, scale, bits, group), out, blocks=_blocks(ends))


def _delta_encode(x: Tensor, memory: Tensor, *rest: Any) -> Tensor:
    payload, scale, bits, group, fresh, *words, rate, ends = rest
    codes, noise = Codes(payload, scale, bits, group), _noise(*words)
    return _kernels(x).delta_encode(
        x, memory, codes, fresh, noise=noise, rate=rate, blocks=_blocks(ends)
    )


def _delta_decode(payload: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    bits, group, memory, fresh, out, ends = rest
    codes = Codes(payload, scale, bits, group)
    return _kernels(out).delta_decode(codes, memory, fresh, out, blocks=_blocks(ends))


def _no_result(*_: object) -> None:
    """Outputs are arguments."""


def _flag_per_row(*args: Tensor) -> Tensor:
    return args[0].new_empty(args[0].shape[0], dtype=torch.bool)


def _register(library: Any) -> None:
    implementations = {
        "quantize": (_quantize, _no_result),
        "dequantize": (_dequantize, _no_result),
        "delta_encode": (_delta_encode, _flag_per_row),
        "delta_decode": (_delta_decode, _flag_per_row),
    }
    for name, (function, fake) in implementations.items():
        library.define(name + _SCHEMAS[name])
        for device in ("CPU", "CUDA"):
            library.impl(name, function, device)
        torch.library.register_fake(f"thinpipe::{name}", fake, lib=library)


_register(_LIBRARY)

if TYPE_CHECKING:
    _checked: RowKernels = kernels.registered
