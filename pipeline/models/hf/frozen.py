"""Frozen weights of LoRA in less than fp32, from the moment that a stage gets memory.

Matrices are held in bf16: linear layers multiply in bf16 anyway under autocast, so their products
are the same bits. Embeddings give fp32, as they do in fp32, so that the sums of blocks stay in it.
Vectors (norms, biases) and whatever is trained stay in fp32.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinpipe.pipeline.wire.checksum import hex_digest

if TYPE_CHECKING:
    from thinpipe.pipeline.models.hf.config import HuggingFaceConfig


class Frozen:
    """The frozen weights of a cut model that lies on the meta device still."""

    def __init__(self, model: Any, config: "HuggingFaceConfig") -> None:
        """Change their dtypes."""
        self.digests: dict[str, str] = {}
        """Of the values that were read of every parameter, in fp32, by name."""
        self._digest = config.lora is not None
        if config.weights in (None, "fp32"):
            return
        heads = trained_heads(model)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and name.partition(".")[0] not in heads:
                parameter.data = parameter.data.bfloat16()
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.weight.dtype == torch.bfloat16:
                module.register_forward_hook(_widen)

    def put(self, name: str, parameter: Tensor, values: Tensor) -> None:
        """Store what was read of a parameter."""
        if self._digest:
            self.digests[name] = hex_digest(values.float())
        parameter.copy_(values)


def trained_heads(model: Any) -> list[str]:
    """Modules beside the base model that are trained with its adapters."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return []
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def _widen(_module: nn.Module, _arguments: Any, rows: Tensor) -> Tensor:
    return rows.float()
