"""What `pipeline.devices_per_rank` asks of the other settings."""

from itertools import pairwise

from thinpipe.launch.config.model import ModelSection
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.schedule import ZERO_BUBBLE, stage_to_rank


def check_devices(pipeline: PipelineConfig, model: ModelSection) -> None:
    """Check that every stage can be spread over the devices of its rank.

    Raises:
        ValueError: it cannot; names the setting to change.
    """
    if pipeline.devices_per_rank == 1:
        return
    problem = _problem(pipeline, model)
    if problem is not None:
        raise ValueError(f"pipeline.devices_per_rank = {pipeline.devices_per_rank}: {problem}")


def _problem(pipeline: PipelineConfig, model: ModelSection) -> str | None:
    bounds = (0, *pipeline.cuts, model.layers)
    sizes = [stop - first for first, stop in pairwise(bounds)]
    ranks = stage_to_rank(pipeline.schedule, stages=pipeline.stages, ranks=pipeline.pipeline_ranks)
    if isinstance(model, OwnModelConfig):
        return "not supported for a model of one's own (model.factory); use one device per rank"
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
    if ranks[0] == ranks[pipeline.stages - 1] and _ties(model, stages=pipeline.stages):
        return (
            "embedding and head are one weight on this rank, and would be on two devices; "
            "separate them by a cut between ranks, or untie them"
        )
    if isinstance(model, HuggingFaceConfig) and model.family.shared:
        parts = ", ".join(model.family.shared)
        return f"all blocks of this model use {parts}; use one device per rank"
    return None


def _ties(model: ModelSection, *, stages: int) -> bool:
    """Whether embedding and head are one weight where a rank holds both."""
    uncut = isinstance(model, HuggingFaceConfig) and model.ties_embeddings and stages == 1
    return model.tie_embeddings == "exact" or uncut
