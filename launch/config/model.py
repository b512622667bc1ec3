"""The [model] section: ThinPipe's transformer, a Hugging Face model, or a custom one."""

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
    return str(getattr(value, "tag", "shape"))


ModelSection = Annotated[
    Annotated[TransformerConfig, Tag("shape")]
    | Annotated[HuggingFaceConfig, Tag("folder")]
    | Annotated[OwnModelConfig, Tag("own")],
    Discriminator(model_kind),
]
