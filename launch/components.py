"""The parts that a rank trains with; `launch/build.py` joins them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from thinpipe.launch.best import Best
from thinpipe.launch.optimizer import Rates
from thinpipe.pipeline.engine import PipelineEngine
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.stage import Stage

if TYPE_CHECKING:
    from thinpipe.gradcomp.sharded.stage import StageShards
    from thinpipe.launch.data.streams.stream import StreamSet


@dataclass(frozen=True)
class Built:
    """The parts of a rank, made and called alike on all ranks."""

    stages: list[Stage]
    engine: PipelineEngine
    optimizer: torch.optim.Optimizer
    lr_schedule: Rates
    sync: ReplicaSync
    best: Best
    shards: "StageShards | None" = None
    samples: "StreamSet | None" = None
    """Samples whose place is saved: those of a stream."""
