"""Stages of any kind of model, and how many parameters they have."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import nn

from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.transformer import TransformerConfig

if TYPE_CHECKING:
    from thinpipe.pipeline.models.hf.stage import HuggingFaceStage
    from thinpipe.pipeline.models.own.stage import ForwardStage, OwnStage
    from thinpipe.pipeline.models.transformer import TransformerStage

ModelConfig = TransformerConfig | HuggingFaceConfig | OwnModelConfig
StageModule: TypeAlias = "TransformerStage | HuggingFaceStage | OwnStage | ForwardStage"


def trainable(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are not frozen."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


class Counts(NamedTuple):
    """Parameters that are held, and those of them that are not frozen."""

    held: int
    trained: int


def stage_counts(config: ModelConfig, cuts: Sequence[int]) -> Counts:
    """Parameters of one replica's stages; what a model ties and a cut parts counts twice."""
    stages = [
        config.build(first, stop, seed=0, device="meta")
        for first, stop in pairwise((0, *cuts, config.layers))
    ]
    return Counts(
        sum(parameter.numel() for stage in stages for parameter in stage.parameters()),
        sum(parameter.numel() for stage in stages for parameter in trainable(stage)),
    )
