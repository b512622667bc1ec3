"""RunConfig -> the parts of a rank: boundaries, blocks of the model, the loss.

What planners and checkpoints need without building a rank; `launch/build.py` joins them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.store import Store
from thinpipe.aqsgd.transform.config import TransformConfig, build_transform
from thinpipe.aqsgd.transform.evaluation import FirstVisits
from thinpipe.gradcomp.sharded.stage import StageShards
from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.optimizer import Rates
from thinpipe.pipeline.comm.boundary import Boundary, Stateless, raw
from thinpipe.pipeline.comm.message import Mode
from thinpipe.pipeline.config import DirectConfig, StatelessConfig
from thinpipe.pipeline.engine import PipelineEngine
from thinpipe.pipeline.loss import Classification, NextToken, Objective
from thinpipe.pipeline.models.build import StageModule, build_model
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.loss import OwnLoss
from thinpipe.pipeline.models.torchgpipe_stage import LocalPipeline
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.stage import CompressedStage


@dataclass(frozen=True)
class Built:
    """What a rank trains with."""

    stages: list[CompressedStage]
    engine: PipelineEngine
    optimizer: torch.optim.Optimizer
    lr_schedule: Rates
    sync: ReplicaSync
    shards: StageShards | None = None


def build_objective(config: RunConfig) -> Objective:
    """What the model's head is trained for."""
    model, classes = config.model, config.model.classes
    if isinstance(model, OwnModelConfig) and model.functions.loss is not None:
        return OwnLoss(model.functions.loss, model.functions.count, model.outputs[-1])
    return NextToken() if classes is None else Classification(classes)


def build_boundary(
    spec: Spec,
    *,
    width: int,
    key: int,
    store: Store | None = None,
    capacity: int | None = None,
) -> dict[Mode, Boundary]:
    """Boundaries of one direction by mode; evaluation never meets the training memory.

    Compressed evaluation of samples without history uses what such samples are trained with: the
    first-visit codec of AQ-SGD, the codec itself otherwise. `store` (RAM if there is none) is where
    AQ-SGD keeps what it remembers, `capacity` how many samples that may be.
    """
    if isinstance(spec, AqsgdConfig):
        delta = build_delta(spec, width=width, key=key, store=store, capacity=capacity)
        first_visit = Stateless(spec.first_visit_codec(width), key)
        return {"train": delta, "eval": raw(), "eval_compressed": first_visit}
    if isinstance(spec, TransformConfig):
        training = build_transform(spec, width=width, store=store, capacity=capacity)
        return {"train": training, "eval": raw(), "eval_compressed": FirstVisits(training)}
    if isinstance(spec, DirectConfig):
        same: Boundary = Stateless(spec.quantizer(width), key)
    elif isinstance(spec, StatelessConfig):
        same = Stateless(spec.quantizer(), key)
    else:
        same = raw(spec.format)
    return {"train": same, "eval": raw(), "eval_compressed": same}


def build_stage(
    config: RunConfig, stage: int, devices: Sequence[torch.device]
) -> StageModule | LocalPipeline:
    """The module of a stage, spread over the devices if there are several."""
    bounds = (0, *config.pipeline.cuts, config.model.layers)
    first, stop = bounds[stage], bounds[stage + 1]
    if len(devices) == 1:
        return build_blocks(config, first, stop, device=devices[0])

    def build_part(first: int, stop: int, device: torch.device) -> StageModule:
        return build_blocks(config, first, stop, device=device)

    return LocalPipeline(build_part, first, stop, devices=devices)


def build_blocks(
    config: RunConfig,
    first: int,
    stop: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> StageModule:
    """The part of the model from block `first` to before `stop`, by default that block alone."""
    stop = first + 1 if stop is None else stop
    return build_model(config.model, first, stop, seed=config.run.seed, device=device)
