"""Linear layers whose frozen weights are codes of 4 or 8 bits, made and read by bitsandbytes.

"nf4" is QLoRA's NormalFloat with double quantization (Dettmers et al. 2023, arXiv 2305.14314): a
code per value, a scale of 8 bits per 64, one of 32 bits per 16384. "int8" has a scale of 32 bits
per row (Dettmers et al. 2022, arXiv 2208.07339); inputs are not quantized.

Axes: O outputs, I inputs.
"""

import importlib
import logging
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# It tells those with AVX-512 to install more kernels, of which none is used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

Quantization = Literal["nf4", "int8"]
_BLOCK, _SCALES = 64, 256  # values that share a scale, and scales that share one
_PIECE = 1 << 17
"""Values that are quantized at once: what that takes is gone before the next, and is below what
`return_freed_memory` maps.
"""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer. Its weight lies on the meta device until `quantize` gives it codes:
    [O I / 2, 1] of uint8 or [O, I] of int8.
    """

    def __init__(self, plain: nn.Linear, form: Quantization) -> None:
        """Take the place of a layer that has no values yet."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias, self.form = plain.weight, plain.bias, form
        self._scales: Any = None

    def quantize(self, values_OI: Tensor) -> None:
        """Hold these values, on the CPU: kernels of devices may round otherwise."""
        codes, self._scales = (_nf4 if self.form == "nf4" else _int8)(values_OI)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def plain_weight(self) -> Tensor:
        """What the codes stand for, in bf16 [O, I]."""
        functional = bitsandbytes().functional
        if self.form == "nf4":
            if self._scales.absmax.device != self.weight.device:
                self._scales.to(self.weight.device)
            found: Tensor = functional.dequantize_4bit(self.weight, self._scales)
            return found
        self._scales = self._scales.to(self.weight.device)
        wide_OI: Tensor = functional.int8_vectorwise_dequant(self.weight, self._scales)
        return wide_OI.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in autocast's dtype, as other linear layers do."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        found: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + self.bias.to(found.dtype)


def _nf4(values_OI: Tensor) -> tuple[Tensor, Any]:
    """Codes and scales of `quantize_4bit`, bit for bit; that takes 20 bytes per value at once."""
    functional = bitsandbytes().functional
    pieces = [
        functional.quantize_4bit(
            piece.float(), blocksize=_BLOCK, compress_statistics=False, quant_type="nf4"
        )
        for piece in torch.split(values_OI.flatten(), _PIECE)
    ]
    scales = torch.cat([state.absmax for _, state in pieces])
    offset = scales.mean()
    coded, its_scales = functional.quantize_blockwise(scales - offset, blocksize=_SCALES)
    return torch.cat([codes for codes, _ in pieces]), functional.QuantState(
        absmax=coded,
        shape=values_OI.shape,
        dtype=torch.bfloat16,  # of what they are read to
        blocksize=_BLOCK,
        code=pieces[0][1].code,
        quant_type="nf4",
        offset=offset,
        state2=its_scales,
    )


def _int8(values_OI: Tensor) -> tuple[Tensor, Any]:
    rows = max(1, _PIECE // values_OI.shape[1])
    quantize = bitsandbytes().functional.int8_vectorwise_quant
    pieces = [quantize(piece.half()) for piece in torch.split(values_OI, rows)]
    return torch.cat([codes for codes, *_ in pieces]), torch.cat([its for _, its, _ in pieces])


class _Product(torch.autograd.Function):
    """Keeps nothing for the backward but the layer: the weight is read from its codes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.plain_weight().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.layer.plain_weight().to(gradient.dtype), None


def linear_layers(blocks: nn.Module) -> dict[str, nn.Linear]:
    """The layers of these blocks that can be quantized, by name."""
    return {name: part for name, part in blocks.named_modules() if type(part) is nn.Linear}


def quantized_nbytes(values: int, outputs: int, form: Quantization) -> int:
    """Bytes of the codes and scales of a matrix of so many values and outputs."""
    if form == "int8":
        return values + 4 * outputs
    scales = math.ceil(values / _BLOCK)
    return math.ceil(values / 2) + scales + 4 * math.ceil(scales / _SCALES)


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's state dict in fp32, with values in place of codes."""
    state = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in module.state_dict().items()
    }
    for name, part in module.named_modules():
        if isinstance(part, QuantizedLinear):
            state[f"{name}.weight"] = part.plain_weight().float()
    return state


def bitsandbytes() -> Any:
    """The library; it is imported where it is used, as it takes a second."""
    return importlib.import_module("bitsandbytes")
