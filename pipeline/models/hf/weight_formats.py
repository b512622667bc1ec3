"""Weights in less than fp32, from the moment that a stage gets memory.

Matrices are held in bf16: linear layers multiply in bf16 anyway under autocast, so their products
are the same bits. Frozen embeddings give fp32, as they do in fp32, so that the sums of blocks stay
in it. Vectors (norms, biases) stay in fp32. With LoRA so does whatever is trained, and frozen
linear layers of blocks may be codes (`quantized.py`). Without it embeddings stay in fp32, and the
heads that share their weight: the gradient of a frequent token is a sum of thousands.
"""

import importlib.util
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinpipe.pipeline.models.hf.init import head_of
from thinpipe.pipeline.models.hf.lora import trained_heads
from thinpipe.pipeline.models.hf.quantized import (
    Quantization,
    QuantizedLinear,
    linear_layers,
    quantized_nbytes,
)
from thinpipe.pipeline.wire.checksum import hex_digest

if TYPE_CHECKING:
    from thinpipe.pipeline.models.hf.config import HuggingFaceConfig


class SmallWeights:
    """Those of a cut model that lies on the meta device still."""

    def __init__(self, model: Any, config: "HuggingFaceConfig", blocks: str) -> None:
        """Change their dtypes; `blocks` is the path of the blocks."""
        self.digests: dict[str, str] = {}
        """Of the values that were read of every parameter, in fp32, by name."""
        self._model, self._digest = model, config.lora is not None
        self._layers: dict[str, QuantizedLinear] = {}
        self._quantized: tuple[str, Quantization] | None = None
        if config.weights in (None, "fp32"):
            return
        heads = trained_heads(model)
        wide = _stay_wide(model, config)
        for name, parameter in model.named_parameters():
            narrow = id(parameter) not in wide and name.partition(".")[0] not in heads
            if narrow and parameter.dim() > 1:
                parameter.data = parameter.data.bfloat16()
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.weight.dtype == torch.bfloat16:
                module.register_forward_hook(lambda _module, _arguments, rows: rows.float())
        if config.weights in ("nf4", "int8"):
            check_quantizable(model, config, blocks)
            self._quantized = blocks, config.weights

    def to_empty(self) -> None:
        """Give the model memory on the CPU; what will be codes gets it when it is read."""
        if self._quantized is not None:
            blocks, form = self._quantized
            for name, plain in linear_layers(self._model.get_submodule(blocks)).items():
                layer = QuantizedLinear(plain, form)
                self._model.set_submodule(f"{blocks}.{name}", layer)
                self._layers[f"{blocks}.{name}.weight"] = layer
        for module in self._model.modules():
            if not isinstance(module, QuantizedLinear):
                module.to_empty(device="cpu", recurse=False)
            elif module.bias is not None:
                module.bias = nn.Parameter(torch.empty_like(module.bias, device="cpu"))

    @property
    def read_later(self) -> Set[str]:
        """Names of parameters that have no memory until files are read."""
        return self._layers.keys()

    def put(self, name: str, parameter: Tensor, values: Tensor) -> None:
        if self._digest:
            self.digests[name] = hex_digest(values)
        if layer := self._layers.get(name):
            _check_range(name, values, layer.form)
            layer.quantize(values)
        else:
            parameter.copy_(values)


def _check_range(name: str, values: Tensor, form: Quantization) -> None:
    """Scales of int8 are made of fp16 values: beyond them whole rows would be NaN."""
    largest = max(abs(float(end)) for end in values.aminmax())
    limit = torch.finfo(torch.float16 if form == "int8" else torch.bfloat16).max
    if not largest <= limit:
        raise ValueError(
            f'{name}: a value of {largest:g} cannot be quantized; use model.weights = "bf16"'
        )


def check_quantizable(model: Any, config: "HuggingFaceConfig", blocks: str) -> None:
    """Check that the blocks have layers that can be quantized, and the library is there.

    Raises:
        ImportError: the library is not there.
        ValueError: there is no such layer.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f'model.weights = "{config.weights}" needs bitsandbytes: pip install '
            '"thinpipe[quantized]"; or use "bf16"'
        )
    if not linear_layers(model.get_submodule(blocks)):
        raise ValueError(
            f'model.weights = "{config.weights}": the blocks of '
            f"{config.transformers_config.model_type} have no nn.Linear, whose weights alone are "
            'quantized; use "bf16"'
        )


def held_nbytes(stage: Any, config: "HuggingFaceConfig") -> int:
    """Bytes of the weights of a stage that was built on the meta device."""
    found: int = sum(parameter.nbytes for parameter in stage.parameters())
    if config.weights not in ("nf4", "int8"):
        return found
    for block in stage.parts():
        for weight in (layer.weight for layer in linear_layers(block).values()):
            if not weight.requires_grad:  # else an adapter's
                codes = quantized_nbytes(weight.numel(), len(weight), config.weights)
                found += codes - weight.nbytes
    return found


def _stay_wide(model: Any, config: "HuggingFaceConfig") -> Set[int]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if config.lora is not None:
        # one that scales, as Gemma's, computes in the dtype of its weight
        return {id(module.weight) for module in embeddings if type(module) is not nn.Embedding}
    found = {id(module.weight) for module in embeddings}
    if config.ties_embeddings:  # where a cut took the head out, it has no weight
        found.add(id(getattr(head_of(model), "weight", None)))
    return found
