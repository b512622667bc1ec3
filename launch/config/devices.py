"""Checks of `pipeline.devices_per_rank` and `pipeline.offload` against other settings."""

from itertools import pairwise

from thinpipe.gradcomp.registry import brings_optimizer
from thinpipe.launch.config.model import ModelSection
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.schedule import ZERO_BUBBLE, stage_to_rank


def check_devices(pipeline: PipelineConfig, model: ModelSection) -> None:
    """Check that every stage can be spread over the devices of its rank."""
    if pipeline.devices_per_rank == 1:
        return
    problem = _problem(pipeline, model)
    if problem is not None:
        raise ValueError(f"pipeline.devices_per_rank = {pipeline.devices_per_rank}: {problem}")


def check_offload(pipeline: PipelineConfig, method: str) -> None:
    """Check that an optimizer may keep its state elsewhere, and stages what they save."""
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


def _problem(pipeline: PipelineConfig, model: ModelSection) -> str | None:
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
