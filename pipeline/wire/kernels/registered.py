"""The kernels as `torch.ops.thinpipe.*`, so that `torch.compile` can hold them in one graph.

`define`, `impl` and `register_fake` cost about 10 microseconds a call; `custom_op` costs 100. The
backend is chosen by the tensors' device. Importing this module registers the operators.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.wire.codec import Noise
from pipeline.wire.kernels import Codes, KernelSet, load_kernels

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from pipeline.wire import kernels

_LIBRARY = torch.library.Library("thinpipe", "DEF")  # type: ignore[no-untyped-call]
_NOISE = "int key, int step, Tensor? row_B"
_SCHEMAS = {
    "quantize": "(Tensor x, Tensor(a!) payload, Tensor(b!) scale, int bits, int group, "
    f"{_NOISE}) -> ()",
    "dequantize": "(Tensor payload, Tensor scale, int bits, int group, Tensor(a!) out) -> ()",
    "delta_encode": "(Tensor x, Tensor memory, Tensor(a!) payload, Tensor(b!) scale, int bits, "
    f"int group, Tensor(c!) fresh, {_NOISE}) -> Tensor",
    "delta_decode": "(Tensor payload, Tensor scale, int bits, int group, Tensor memory, "
    "Tensor(a!) fresh, Tensor(b!) out) -> Tensor",
}


def quantize(x_BN: Tensor, codes: Codes, *, noise: Noise | None) -> None:
    """Fill `codes`; see `KernelSet.quantize`."""
    torch.ops.thinpipe.quantize(x_BN, *codes, *_words(noise))


def dequantize(codes: Codes, out_BN: Tensor) -> None:
    """Write the values of codes and scales; see `KernelSet.dequantize`."""
    torch.ops.thinpipe.dequantize(*codes, out_BN)


def delta_encode(
    x_BN: Tensor, memory_BN: Tensor, codes: Codes, fresh_BN: Tensor, *, noise: Noise | None
) -> Tensor:
    """Quantize x - memory and write memory + change; `fresh_BN` must not be `memory_BN`."""
    finite_B: Tensor = torch.ops.thinpipe.delta_encode(
        x_BN, memory_BN, *codes, fresh_BN, *_words(noise)
    )
    return finite_B


def delta_decode(codes: Codes, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor) -> Tensor:
    """Write memory + change to both outputs; `fresh_BN` must not be `memory_BN`."""
    finite_B: Tensor = torch.ops.thinpipe.delta_decode(*codes, memory_BN, fresh_BN, out_BN)
    return finite_B


def _words(noise: Noise | None) -> tuple[int, int, Tensor | None]:
    """Key as a signed 64-bit integer, step, row numbers."""
    if noise is None:
        return 0, 0, None
    return (noise.key + 2**63) % 2**64 - 2**63, noise.step & 0xFFFFFFFF, noise.row_B


def _noise(key: int, step: int, row_B: Tensor | None) -> Noise | None:
    return None if row_B is None else Noise(key, step, row_B)


def _kernels(x_BN: Tensor) -> KernelSet:
    return load_kernels("auto", x_BN.device)


def _quantize(
    x: Tensor, payload: Tensor, scale: Tensor, bits: int, group: int, *words: int | Tensor | None
) -> None:
    _kernels(x).quantize(x, Codes(payload, scale, bits, group), noise=_noise(*words))  # type: ignore[arg-type]


def _dequantize(payload: Tensor, scale: Tensor, bits: int, group: int, out: Tensor) -> None:
    _kernels(out).dequantize(Codes(payload, scale, bits, group), out)


def _delta_encode(x: Tensor, memory: Tensor, *rest: Tensor | int | None) -> Tensor:
    codes, fresh, noise = Codes(*rest[:4]), rest[4], _noise(*rest[5:])  # type: ignore[arg-type]
    assert isinstance(fresh, Tensor)
    return _kernels(x).delta_encode(x, memory, codes, fresh, noise=noise)


def _delta_decode(
    payload: Tensor, scale: Tensor, bits: int, group: int, *tensors: Tensor
) -> Tensor:
    memory, fresh, out = tensors
    codes = Codes(payload, scale, bits, group)
    return _kernels(out).delta_decode(codes, memory, fresh, out)


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
    _checked: KernelSet = kernels.registered
