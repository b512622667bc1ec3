"""A stage of any kind of model, by its settings."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.self_check import check_step
from thinpipe.pipeline.models.hf.stage import HuggingFaceStage, build_stage, check_folder
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.stage import OwnStage, build_own
from thinpipe.pipeline.models.transformer import TransformerConfig, TransformerStage, build_layers

ModelConfig = TransformerConfig | HuggingFaceConfig | OwnModelConfig
StageModule = TransformerStage | HuggingFaceStage | OwnStage


def build_model(
    config: ModelConfig, first: int, stop: int, *, seed: int, device: torch.device | str
) -> StageModule:
    """Build the stage that holds blocks `first` to `stop - 1`, with only its own weights.

    Raises:
        ValueError: there is no such range of layers, or the model's folder cannot be used.
    """
    if isinstance(config, HuggingFaceConfig):
        return build_stage(config, first, stop, seed=seed, device=device)
    if isinstance(config, OwnModelConfig):
        return build_own(config, first, stop, seed=seed, device=device)
    return build_layers(config, first, stop, seed=seed, device=device)


def check_model(config: ModelConfig) -> None:
    """Look at a model's files without reading weights, unless a self-check is asked for.

    Needs all files.

    Raises:
        ValueError: they cannot be used; names file, tensor and remedy.
    """
    if isinstance(config, HuggingFaceConfig):
        check_folder(config)
        if config.self_check:
            check_step(config, seed=0)


def trainable(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are not frozen."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters of the whole model."""
    whole = build_model(config, 0, config.layers, seed=0, device="meta")
    return sum(parameter.numel() for parameter in whole.parameters())


class Counts(NamedTuple):
    """Parameters that are held, and those of them that are not frozen."""

    held: int
    trained: int


def stage_counts(config: ModelConfig, cuts: Sequence[int]) -> Counts:
    """Parameters of one replica's stages; what a model ties and a cut parts counts twice."""
    stages = [
        build_model(config, first, stop, seed=0, device="meta")
        for first, stop in pairwise((0, *cuts, config.layers))
    ]
    return Counts(
        sum(parameter.numel() for stage in stages for parameter in stage.parameters()),
        sum(parameter.numel() for stage in stages for parameter in trainable(stage)),
    )
