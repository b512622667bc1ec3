"""The [model] section: ThinPipe's transformer, a Hugging Face model, or a custom one."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from thinpipe.pipeline.config import PipelineConfig
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


def with_weights(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's sections, with the default of `model.weights` where LoRA freezes weights."""
    model, pipeline = tree.get("model"), tree.get("pipeline")
    if model_kind(model) != "folder" or not _get(model, "lora") or _get(model, "weights"):
        return tree
    if _get(pipeline, "precision") != "bf16" or (_get(pipeline, "shards") or 1) != 1:
        return tree
    if isinstance(model, Mapping):
        return {**tree, "model": {**model, "weights": "bf16"}}
    return {**tree, "model": model.model_copy(update={"weights": "bf16"})}  # type: ignore[union-attr]


def check_weights(pipeline: PipelineConfig, model: ModelSection) -> None:
    """Check that a stage can compute with its frozen weights.

    Raises:
        ValueError: it cannot; names the setting to change.
    """
    weights = getattr(model, "weights", None) or "fp32"
    if weights != "fp32" and pipeline.shards > 1:
        raise ValueError(
            f'model.weights = "{weights}" with pipeline.shards = {pipeline.shards}: shards '
            "exchange weights in fp32; leave out weights, or use stages instead of shards"
        )
    if weights != "fp32" and pipeline.precision != "bf16":
        raise ValueError(
            f'model.weights = "{weights}" with pipeline.precision = "{pipeline.precision}": such '
            'weights are multiplied in bf16; set pipeline.precision = "bf16", or leave out weights'
        )


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
