"""Checks of `pipeline.devices_per_rank`, `offload` and `shards` against other settings."""

from itertools import pairwise

import torch

from thinpipe.gradcomp.registry import brings_optimizer
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.config.model import ModelSection
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.orders import ZERO_BUBBLE, stage_to_rank


def check_devices(pipeline: PipelineConfig, model: ModelSection) -> None:
    """Check that every stage can be spread over the devices of its rank.

    Raises:
        ValueError: it cannot; names the setting to change.
    """
    if pipeline.devices_per_rank == 1:
        return
    problem = _undivided(pipeline, model)
    if problem is not None:
        raise ValueError(f"pipeline.devices_per_rank = {pipeline.devices_per_rank}: {problem}")


def check_offload(pipeline: PipelineConfig, method: str) -> None:
    """Check that an optimizer may keep its state elsewhere, and stages what they save.

    Raises:
        ValueError: naming the setting to change.
    """
    if not pipeline.offload:
        return
    if pipeline.devices_per_rank > 1:
        raise ValueError(
            f"pipeline.offload = true with pipeline.devices_per_rank = {pipeline.devices_per_rank}:"
            " not supported; use one device per rank, or remove it"
        )
    if brings_optimizer(method):
        raise ValueError(
            f'pipeline.offload = true with gradcomp.method = "{method}": not supported, as that '
            "works on the optimizer's state; use another method, or remove it"
        )


def _undivided(pipeline: PipelineConfig, model: ModelSection) -> str | None:
    bounds = (0, *pipeline.cuts, model.layers)
    sizes = [stop - first for first, stop in pairwise(bounds)]
    ranks = stage_to_rank(pipeline.schedule, stages=pipeline.stages, ranks=pipeline.pipeline_ranks)
    if model.is_own:
        return "not supported for a custom model (model.factory); use one device per rank"
    if pipeline.schedule in ZERO_BUBBLE:
        return (
            f'pipeline.schedule = "{pipeline.schedule}" splits the backward pass, which torchgpipe '
            "cannot; use another schedule"
        )
    if pipeline.auto_cuts:
        return 'pipeline.cuts = "auto" measures blocks on one device; give the cuts'
    if pipeline.replicas > 1:
        return (
            f"not supported with pipeline.replicas = {pipeline.replicas}; use one replica, or one "
            "device per rank"
        )
    if min(sizes) < pipeline.devices_per_rank:
        return (
            f"stage {sizes.index(min(sizes))} has {min(sizes)} of the model's layers, and every "
            "device needs one; move the cuts, or use fewer devices per rank"
        )
    exact = model.tie_embeddings == "exact"  # a cut parts what is tied otherwise
    tied = model.ties_uncut if pipeline.stages == 1 else exact
    if ranks[0] == ranks[pipeline.stages - 1] and tied:
        return (
            "embedding and head are one weight on this rank, and would be on two devices; "
            "separate them by a cut between ranks, or untie them"
        )
    if model.frozen_parts:
        parts = ", ".join(model.frozen_parts)
        return f"all blocks of this model use {parts}; use one device per rank"
    return None


def check_shards(
    pipeline: PipelineConfig, shards: ShardsConfig, model: ModelSection, optimizer: str
) -> None:
    """Check that every stage can be held by several ranks."""
    if pipeline.shards == 1:
        return
    problem = _unsharded(pipeline, model) or _needs_wholes(model, optimizer)
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


def _unsharded(pipeline: PipelineConfig, model: ModelSection) -> str | None:
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
