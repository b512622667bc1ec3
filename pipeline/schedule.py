"""The orders of `pipeline/orders.py` as torch's schedules, which run stages."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType
from torch.distributed.pipelining.stage import _PipelineStageBase

from thinpipe.pipeline.orders import (
    ONE_STAGE_PER_RANK,
    PassOrder,
    single_stage_order,
)
from thinpipe.pipeline.wire.told import ScheduleName

LossFunction = Callable[[Tensor, Tensor], Tensor]


def build_schedule(
    name: ScheduleName,
    stages: Sequence[_PipelineStageBase],
    microbatches: int,
    *,
    loss: LossFunction,
    depth: int,
) -> Any:
    """torch schedule object for this rank's stages. `scale_grads` is off: the loss divides."""
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name == "1F1B" and microbatches < stages[0].num_stages:
        depth = 0  # torch's class rejects; ours runs the same order
    elif name in ("GPipe", "1F1B"):
        return getattr(torch_schedules, f"Schedule{name}")(stages[0], microbatches, **options)
    if name in ONE_STAGE_PER_RANK:
        return _Deep1F1B(stages[0], microbatches, depth=depth, **options)
    return getattr(torch_schedules, f"Schedule{name}")(list(stages), microbatches, **options)


def pass_order(schedule: Any, stage: int, *, microbatches: int) -> PassOrder:
    """Order of a stage's work under a schedule that `build_schedule` returned."""
    if not isinstance(schedule, torch_schedules.PipelineScheduleMulti):
        return PassOrder.ascending(microbatches)
    actions = [
        (action.computation_type, action.microbatch_index)
        for order in schedule.pipeline_order.values()
        for action in order
        if action is not None and action.stage_index == stage
        if action.microbatch_index is not None
    ]
    backwards = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)
    return PassOrder(
        [m for kind, m in actions if kind == _ComputationType.FORWARD],
        [m for kind, m in actions if kind in backwards],
    )


class _Deep1F1B(torch_schedules._PipelineScheduleRuntime):
    def __init__(
        self, stage: _PipelineStageBase, n_microbatches: int, *, depth: int, **options: Any
    ) -> None:
        super().__init__([stage], n_microbatches, **options)  # type: ignore[no-untyped-call]
        kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
        count = stage.num_stages
        self.pipeline_order = {
            s: [
                _Action(s, kinds[action.kind], action.microbatch)
                for action in single_stage_order(
                    "Deep1F1B", s, stages=count, microbatches=n_microbatches, depth=depth
                )
            ]
            for s in range(count)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
