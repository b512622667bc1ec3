"""The orders of `pipeline/orders.py` as torch's schedules, and the stages that they run.

Torch's schedules only order the compute: they ask for send and receive operations, get none. The
schedule's "send" hook hands a tensor to the outgoing end of a channel, its "retrieve" hook waits
for what an incoming end decoded. We subclass `_PipelineStageBase`, not `PipelineStage`, so no shape
inference runs: a stage sees real data only. `tests/test_torch_seams.py` lists every private name
used here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType
from torch.distributed.pipelining.stage import _PipelineStageBase

from thinpipe.pipeline.comm.channel import Pass
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.orders import ONE_STAGE_PER_RANK, PassOrder, rank_orders
from thinpipe.pipeline.stage import LossFunction, Stage
from thinpipe.pipeline.wire.header import DesyncError
from thinpipe.pipeline.wire.told import ScheduleName


class CompressedStage(Stage, _PipelineStageBase):
    """A torch pipeline stage that owns its communication."""

    def __init__(self, module: nn.Module, stage_index: int, num_stages: int, **given: Any) -> None:
        """As `Stage`."""
        Stage.__init__(self, module, stage_index, num_stages, **given)
        _PipelineStageBase.__init__(self, module, stage_index, num_stages, self.device, self.group)
        self._runtime_validate = False
        self._computing = 0

    def begin_pass(self, this: Pass, order: PassOrder | None = None) -> None:
        self.chunks = len(this.microbatches)  # torch sets it once per schedule, and we keep several
        super().begin_pass(this, order)

    def regroup(self, group: dist.ProcessGroup) -> None:
        super().regroup(group)
        self.group_rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)

    # What torch's schedules call. Names and signatures are torch's.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = self.mark()
        self._computing = fwd_chunk_id
        with _naming_peers():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.mark_computed("F", fwd_chunk_id, start)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args
        return self.compute(x, self._computing)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        start = self.mark()
        with _naming_peers():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.mark_computed("B", bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        start = self.mark()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.mark_computed("W", bwd_chunk_id, start)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        self.send_activation(fwd_chunk_id, output)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and self.channels.gradients_out is not None:
            (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
            assert gradient is not None, "the stage's input got no gradient"
            if self._shared_with_weights(bwd_chunk_id, gradient):
                gradient = gradient.clone()
            self.send_gradient(bwd_chunk_id, gradient)
        return []

    def _shared_with_weights(self, m: int, gradient: Tensor) -> bool:
        """Whether the second half of a split backward turns the same memory into a weight's
        gradient, which later microbatches add to in place.
        """
        if m not in self.backward_state:
            return False
        _, param_groups, _, _ = self.backward_state[m]
        return any(
            kept is not None
            and kept.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
            for group in param_groups
            for kept_tuple in group.get("grads") or ()
            for kept in kept_tuple or ()
        )

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        needs_grad = self.has_backward and torch.is_grad_enabled()
        return (self.receive_activation(fwd_chunk_id).requires_grad_(needs_grad),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        return (self.receive_gradient(bwd_chunk_id),)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        (gradient,) = next_stage_bwd_outputs
        assert gradient is not None, "the next stage's input got no gradient"
        self._local_gradients[mb_index] = gradient

    def clear_runtime_states(self) -> None:
        # torch's leaves bwd_cache, where gradients that nothing takes would live through the step
        self.fwd_cache.clear()
        self.bwd_cache.clear()
        self.output_chunks.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = {m: () for m in range(num_microbatches)}
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}
        if hasattr(self, "_stage_meta"):  # torch >= 2.12 takes the number of inputs from it
            self._stage_meta.inputs = (None,)  # type: ignore[assignment]
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[()]:
        return ()

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """torch 2.11 calls it; there is nothing inferred to validate against."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """torch 2.11 calls it."""


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


def pass_order(schedule: Any, stage: int) -> PassOrder | None:
    """Order of a stage's work under a schedule that `build_schedule` returned; None: ascending."""
    if not isinstance(schedule, torch_schedules.PipelineScheduleMulti):
        return None
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
        orders = rank_orders(
            "Deep1F1B", stages=count, ranks=count, microbatches=n_microbatches, depth=depth
        )
        self.pipeline_order = {
            s: [_Action(s, kinds[action.kind], action.microbatch) for action in order]
            for s, order in enumerate(orders)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


@contextmanager
def _naming_peers() -> Iterator[None]:
    """A sharded stage waits for other ranks while it computes, and torch hides what they did in an
    error of its own.
    """
    try:
        yield
    except RuntimeError as error:
        hidden = error.__cause__
        if isinstance(hidden, TransportError | DesyncError):
            raise hidden from None
        raise
