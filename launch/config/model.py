"""The [model] section: ThinPipe's transformer, a Hugging Face model, or one of one's own."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.transformer import TransformerConfig


def model_kind(value: Any) -> str:
    """Tag of a section, parsed or not."""
    if isinstance(value, Mapping):
        if "factory" in value:
            return "own"
        return "folder" if {"pretrained", "config"} & value.keys() else "shape"
    if isinstance(value, OwnModelConfig):
        return "own"
    return "folder" if isinstance(value, HuggingFaceConfig) else "shape"


ModelSection = Annotated[
    Annotated[TransformerConfig, Tag("shape")]
    | Annotated[HuggingFaceConfig, Tag("folder")]
    | Annotated[OwnModelConfig, Tag("own")],
    Discriminator(model_kind),
]


def could_be_tied(model: ModelSection) -> bool:
    """Whether a cut makes two trained weights of what could be one."""
    if isinstance(model, OwnModelConfig):
        return False
    if isinstance(model, HuggingFaceConfig) and not model.ties_embeddings:
        return False
    return not is_frozen(model) and model.task == "language" and model.tie_embeddings == "untied"


def is_frozen(model: ModelSection) -> bool:
    """Whether embedding and head are, as everything is that LoRA does not add."""
    return isinstance(model, HuggingFaceConfig) and model.lora is not None


def fresh_dropout(model: ModelSection) -> float:
    """Rate of dropout whose masks differ at every visit of a sample."""
    if isinstance(model, HuggingFaceConfig | OwnModelConfig):
        return model.largest_dropout
    return model.dropout if model.dropout_masks == "random" else 0.0
