"""Checks of `pipeline.shards` against other settings."""

import torch

from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.config.model import ModelSection
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.schedule import ZERO_BUBBLE, stage_to_rank


def check_shards(
    pipeline: PipelineConfig, shards: ShardsConfig, model: ModelSection, optimizer: str
) -> None:
    """Check that every stage can be held by several ranks."""
    if pipeline.shards == 1:
        return
    problem = _problem(pipeline, model) or _needs_wholes(model, optimizer)
    if problem is not None:
        raise ValueError(f"pipeline.shards = {pipeline.shards}: {problem}")
    if pipeline.shards % shards.ranks_per_site:
        raise ValueError(
            f"shards.ranks_per_site = {shards.ranks_per_site}: the {pipeline.shards} shards of a "
            "stage are no whole number of sites; use a divisor of pipeline.shards"
        )


def shards_notices(shards: int, sent: ShardsConfig) -> list[str]:
    """Notes on settings of [shards] that do nothing, or harm, with so many shards."""
    if shards == 1 and sent != ShardsConfig():
        return ["note: [shards] is not used: pipeline.shards = 1, so no stage is sharded"]
    if 1 < shards == sent.ranks_per_site and sent.bits_of("weight") < 32:
        return [
            f"note: shards.ranks_per_site = {shards}: all shards of a stage are on one site, where "
            f"weights of {sent.bits_of('weight')} bits save nothing; use shards.weight_bits = 32, "
            "or fewer ranks per site"
        ]
    return []


def _needs_wholes(model: ModelSection, optimizer: str) -> str | None:
    if model.is_own:
        return "a custom model (model.factory) cannot be sharded; use pipeline.replicas"
    if optimizer != "adamw":
        return (
            f'train.optimizer = "{optimizer}" may need whole matrices, and ranks have some rows '
            'of each; use "adamw"'
        )
    return None


def _problem(pipeline: PipelineConfig, model: ModelSection) -> str | None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < (2, 13):
        return f"needs torch >= 2.13 (this is {torch.__version__})"
    if pipeline.device == "cuda":
        return 'sharded stages run on CPUs only; use pipeline.device = "cpu"'
    if pipeline.devices_per_rank > 1:
        return (
            f"not supported with pipeline.devices_per_rank = {pipeline.devices_per_rank}; use one "
            "device per rank"
        )
    if pipeline.schedule in ZERO_BUBBLE:
        return (
            f'pipeline.schedule = "{pipeline.schedule}" splits the backward pass, which FSDP2\'s '
            "hooks do not see; use another schedule"
        )
    if pipeline.auto_cuts:
        return 'pipeline.cuts = "auto" measures one rank per stage; give the cuts'
    ranks = stage_to_rank(pipeline.schedule, stages=pipeline.stages, ranks=pipeline.pipeline_ranks)
    both_ends = pipeline.stages > 1 and ranks[0] == ranks[pipeline.stages - 1]
    if both_ends and model.tie_embeddings == "exact":
        return (
            "embedding and head are one weight in two stages of this rank, which FSDP2 cannot "
            'share; use model.tie_embeddings = "untied", or a schedule with one stage per rank'
        )
    return None
