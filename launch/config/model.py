"""The [model] section: ThinPipe's transformer, a Hugging Face model, or a custom one."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from thinpipe.gradcomp.registry import brings_optimizer, load_method, method_names
from thinpipe.launch.config.sections import TrainConfig
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.transformer import TransformerConfig

_LARGEST_BETA = 0.99
"""Rounding to bf16 hides changes of less than 1/512 to 1/256; a moment without new gradients must
fall by more: by 1 - beta.
"""


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


def shares_casts(pipeline: PipelineConfig, model: ModelSection) -> bool:
    """Whether microbatches share weights cast to bf16.

    Then each is cast once per step, but its gradient in bf16 stays until a microbatch's backward
    ends: the backward of a cast that an earlier microbatch made comes last. That is too much for
    shards, which exchange gradients block by block, and for a model that saves memory.
    """
    recomputes = model.recomputes(0)  # the first of every nth
    return pipeline.microbatches > 1 and pipeline.shards == 1 and not recomputes


def check_weights(pipeline: PipelineConfig, model: ModelSection) -> None:
    """Check that a stage can compute with its weights.

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


def check_trained_weights(
    model: ModelSection, train: TrainConfig, method: str, replicas: int
) -> None:
    """Check that no small step of weights in bf16 is lost; `method` is that of the exchange.

    Raises:
        ValueError: one would be; names the setting to change.
    """
    if not model.trains_in_bf16:
        return
    remedy = 'or leave out model.weights = "bf16", so that trained weights are in fp32'
    if train.optimizer != "adamw":
        raise ValueError(
            f'train.optimizer = "{train.optimizer}": would lose steps of less than 1/256 of a '
            f'weight in bf16; use "adamw", which keeps them, {remedy}'
        )
    if max(train.betas) > _LARGEST_BETA:
        raise ValueError(
            f"train.betas = {list(train.betas)}: above {_LARGEST_BETA} a step changes a moment in "
            f"bf16 by less than its rounding; use [0.9, {_LARGEST_BETA}], {remedy}"
        )
    if train.weight_decay:
        raise ValueError(
            f"train.weight_decay = {train.weight_decay}: times the learning rate, it changes a "
            f"weight in bf16 by less than its rounding; set it to 0, {remedy}"
        )
    equal = replicas == 1 or method == "none" or load_method(method).REPLICAS_EQUAL
    if not equal or brings_optimizer(method):
        able = [
            name
            for name in method_names()
            if load_method(name).REPLICAS_EQUAL and not brings_optimizer(name)
        ]
        raise ValueError(
            f'gradcomp.method = "{method}": moves weights in a way of its own, which loses small '
            f"steps in bf16; use {', '.join(able)}, {remedy}"
        )


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
