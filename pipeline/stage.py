"""CompressedStage: a torch pipeline stage that owns its communication.

torch's schedules then only order the compute: they ask for send and receive operations, get none.
Receives of a whole pass are posted by `begin_pass`; the schedule's "send" hook hands a tensor to
the outgoing end of a channel, its "retrieve" hook waits for what an incoming end decoded. We
subclass `_PipelineStageBase`, not `PipelineStage`, so no shape inference runs: a stage sees real
data only. `tests/test_torch_seams.py` lists every private name used here.

Axes: B samples of a microbatch, T tokens, D channels, M microbatches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.channel import (
    Channel,
    IncomingChannel,
    Microbatch,
    OutgoingChannel,
    Pass,
)
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.orders import PassOrder
from thinpipe.pipeline.timing import Mark, Stopwatch
from thinpipe.pipeline.wire.header import DesyncError
from thinpipe.pipeline.wire.told import ComputeEvent, EventKind


@dataclass(frozen=True)
class Channels:
    """The four directions of a stage; None where there is no neighbour on another rank."""

    activations_in: IncomingChannel | None = None
    activations_out: OutgoingChannel | None = None
    gradients_in: IncomingChannel | None = None
    gradients_out: OutgoingChannel | None = None

    def all(self) -> list[Channel]:
        four = (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out)
        return [channel for channel in four if channel is not None]

    def outgoing(self) -> list[OutgoingChannel]:
        both = (self.activations_out, self.gradients_out)
        return [channel for channel in both if channel is not None]


class _Computed(NamedTuple):
    """Work of a stage: when it was called, had its input, and ended."""

    kind: Literal["F", "B", "W"]
    microbatch: int
    marks: tuple[Mark, Mark, Mark]


class CompressedStage(_PipelineStageBase):
    """One stage of the pipeline: a module and the channels that join it to its neighbours."""

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        num_stages: int,
        *,
        channels: Channels,
        group: dist.ProcessGroup | None,
        device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
    ) -> None:
        """`group` holds the ranks of one pipeline; no message travels over it.

        The module's parameters must be on `device`.
        """
        super().__init__(module, stage_index, num_stages, device, group)
        self.channels = channels
        self._watch = Stopwatch(device)
        self._events: list[ComputeEvent] = []
        self._computed: list[_Computed] = []
        self._ready = self._watch.mark()
        self._runtime_validate = False
        self._samples: Sequence[Samples] = ()
        self._microbatches: Sequence[Microbatch] = ()
        self._local_inputs: dict[int, Tensor] = {}
        self._local_gradients: dict[int, Tensor] = {}
        self._computing = 0

    def begin_pass(self, this: Pass, order: PassOrder | None = None) -> None:
        """Post every receive of the coming pass; all ranks of the pipeline call it alike.

        `order` is that of this stage's work, by default ascending microbatches. It must be kept.
        """
        microbatches = this.microbatches
        self._samples = [microbatch.samples.to(self.device) for microbatch in microbatches]
        self._microbatches = microbatches
        self.chunks = len(microbatches)  # torch sets it once per schedule, and we keep several
        order = order or PassOrder.ascending(len(microbatches))
        channels, record = self.channels, self._record_event
        if channels.activations_in is not None:
            channels.activations_in.begin_pass(this, record, order.forwards)
        if channels.gradients_in is not None:
            backwards = order.backwards if this.mode == "train" else ()
            channels.gradients_in.begin_pass(this, record, backwards)
        for channel in channels.outgoing():
            channel.begin_pass(this, record)

    def end_pass(self) -> None:
        """Wait until all messages are on their way; then channels and events may be read."""
        for channel in self.channels.outgoing():
            channel.end_pass()

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Go on in another group of the same number of ranks, or for the first time in it."""
        self.group = group
        self.group_rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)

    def abandon_pass(self) -> None:
        """Forget the pass under way, whose messages have failed or are about to."""
        for channel in self.channels.all():
            channel.abandon_pass()
        self._local_inputs.clear()
        self._local_gradients.clear()

    def receive_activation(self, m: int) -> Tensor:
        """Input of microbatch `m`: from the neighbour on this rank, or decoded from the link."""
        if m in self._local_inputs:
            return self._local_inputs.pop(m)
        return self._receive(self.channels.activations_in, m)

    def receive_gradient(self, m: int) -> Tensor:
        if m in self._local_gradients:
            return self._local_gradients.pop(m)
        return self._receive(self.channels.gradients_in, m)

    def send_activation(self, m: int, y_BTD: Tensor) -> None:
        """Have an output encoded and sent; nothing to do if the next stage is on this rank."""
        if self.channels.activations_out is not None:
            self.channels.activations_out.send(m, self._lengthened(m, y_BTD))

    def send_gradient(self, m: int, gradient_BTD: Tensor) -> None:
        """Have an input's gradient encoded and sent; not if the neighbour is on this rank."""
        if self.channels.gradients_out is not None:
            self.channels.gradients_out.send(m, self._lengthened(m, gradient_BTD))

    def compute(self, x: Tensor, m: int) -> Tensor:
        """Run the module on microbatch `m`; one that wants its samples gets them.

        Raises:
            ValueError: samples with padding, packing or a prefix for a module that does not take
            them.
        """
        module: Any = self.submod
        samples = self._samples[m]
        if getattr(module, "wants_samples", False):
            y: Tensor = module(x, samples)
            return y
        if not samples.plain:
            raise ValueError(
                f"stage {self.stage_index}: {type(module).__name__} would ignore padding, packing "
                "or prefixes of its samples; take them as module(x, samples), which "
                "wants_samples = True asks for"
            )
        y = module(x)
        return y

    def events(self) -> list[ComputeEvent]:
        """Compute, coding and waits since `take_events`; waits for a GPU."""
        computed, self._computed = self._computed, []
        seconds = iter(self._watch.seconds([mark for event in computed for mark in event.marks]))
        for event in computed:
            start_s, ready_s, end_s = (next(seconds) for _ in event.marks)
            start_s = max(start_s, ready_s)  # waiting is an event of its own
            self._record_event(event.kind, event.microbatch, start_s, end_s)
        return self._events

    def take_events(self) -> list[ComputeEvent]:
        taken, self._events = self.events(), []
        return taken

    def _receive(self, channel: IncomingChannel | None, m: int) -> Tensor:
        assert channel is not None, f"stage {self.stage_index} has no neighbour to receive from"
        x_BTD = channel.receive(m)
        self._ready = self._watch.mark()
        tokens = self._microbatches[m].tokens
        if tokens is None or tokens == x_BTD.shape[1]:
            return x_BTD
        return x_BTD[:, :tokens].contiguous()

    def _lengthened(self, m: int, x_BTD: Tensor) -> Tensor:
        """With zeros up to the length of the messages, which is all that caches know."""
        missing = self._microbatches[m].shape_BTD[1] - x_BTD.shape[1]
        return nn.functional.pad(x_BTD.detach(), (0, 0, 0, missing)) if missing > 0 else x_BTD

    def _mark_computed(self, kind: Literal["F", "B", "W"], m: int, start: Mark) -> None:
        self._computed.append(_Computed(kind, m, (start, self._ready, self._watch.mark())))

    def _record_event(self, kind: EventKind, m: int, start_s: float, end_s: float) -> None:
        """Channels call it from their threads."""
        self._events.append(ComputeEvent(self.stage_index, kind, m, start_s, end_s))

    # What torch's schedules call. Names and signatures are torch's.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = self._watch.mark()
        self._computing = fwd_chunk_id
        with _naming_peers():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._mark_computed("F", fwd_chunk_id, start)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args
        return self.compute(x, self._computing)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        start = self._watch.mark()
        with _naming_peers():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._mark_computed("B", bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        start = self._watch.mark()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._mark_computed("W", bwd_chunk_id, start)

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

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if isinstance(prev_stage_outputs, tuple):
            (prev_stage_outputs,) = prev_stage_outputs
        self._local_inputs[mb_index] = prev_stage_outputs.detach()

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
