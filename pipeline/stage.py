"""A stage of the pipeline: a module and the channels that join it to its neighbours.

Receives of a whole pass are posted by `begin_pass`. What runs a stage then asks for an input, which
an incoming end of a channel decoded, and hands the output to an outgoing end.
`pipeline/schedule.py` lets torch's schedules run the stages of a pipeline. A model that is not cut
needs none: `MicrobatchLoop` runs it, without torch's pipelining, which takes a second to import.

Axes: B samples of a microbatch, T tokens, D channels, M microbatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.channel import (
    Channel,
    IncomingChannel,
    Microbatch,
    OutgoingChannel,
    Pass,
)
from thinpipe.pipeline.orders import Action, PassOrder
from thinpipe.pipeline.timing import Mark, Stopwatch
from thinpipe.pipeline.wire.told import ComputeEvent, EventKind

LossFunction = Callable[[Tensor, Tensor], Tensor]


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


class Stage:
    """One stage of the pipeline on this rank."""

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
        self.submod, self.stage_index, self.num_stages = module, stage_index, num_stages
        self.group, self.device, self.channels = group, device, channels
        self._watch = Stopwatch(device)
        self._events: list[ComputeEvent] = []
        self._computed: list[_Computed] = []
        self._ready = self._watch.mark()
        self._samples: Sequence[Samples] = ()
        self._microbatches: Sequence[Microbatch] = ()
        self._local_inputs: dict[int, Tensor] = {}
        self._local_gradients: dict[int, Tensor] = {}

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def begin_pass(self, this: Pass, order: PassOrder | None = None) -> None:
        """Post every receive of the coming pass; all ranks of the pipeline call it alike.

        `order` is that of this stage's work, by default ascending microbatches. It must be kept.
        """
        microbatches = this.microbatches
        self._samples = [microbatch.samples.to(self.device) for microbatch in microbatches]
        self._microbatches = microbatches
        ascending = range(len(microbatches))
        order = order or PassOrder(ascending, ascending)
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

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of the stage before, which is on this rank. The name is torch's."""
        if isinstance(prev_stage_outputs, tuple):
            (prev_stage_outputs,) = prev_stage_outputs
        self._local_inputs[mb_index] = prev_stage_outputs.detach()

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
        told = getattr(module, "wants_samples", False)
        if not told and not samples.plain:
            raise ValueError(
                f"stage {self.stage_index}: {type(module).__name__} would ignore padding, packing "
                "or prefixes of its samples; take them as module(x, samples), which "
                "wants_samples = True asks for"
            )
        y: Tensor = module(x, samples) if told else module(x)
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

    def mark(self) -> Mark:
        return self._watch.mark()

    def mark_computed(self, kind: Literal["F", "B", "W"], m: int, start: Mark) -> None:
        """Record a piece of compute that began at `start`."""
        self._computed.append(_Computed(kind, m, (start, self._ready, self._watch.mark())))

    def _record_event(self, kind: EventKind, m: int, start_s: float, end_s: float) -> None:
        """Channels call it from their threads."""
        self._events.append(ComputeEvent(self.stage_index, kind, m, start_s, end_s))


class MicrobatchLoop:
    """Runs the microbatches of a model that is not cut, in the place of a schedule of torch's."""

    def __init__(self, stage: Stage, order: Sequence[Action], loss: LossFunction) -> None:
        """`order` has each microbatch's forward and backward; `loss(output, target)` divides."""
        self._stage, self._order, self._loss = stage, order, loss
        self._count = sum(action.kind == "F" for action in order)

    def step(
        self, inputs: Tensor, *, target: Tensor, losses: list[Tensor], return_outputs: bool
    ) -> None:
        """Accumulate gradients of all samples; `losses` gets those of the microbatches."""
        assert not return_outputs, "outputs are not kept"
        stage, pending = self._stage, dict[int, Tensor]()
        xs, targets = inputs.tensor_split(self._count), target.tensor_split(self._count)
        for kind, _, m in self._order:
            start = stage.mark()
            if kind == "F":
                y = self._compute(xs[m], m)
                stage.mark_computed("F", m, start)
                pending[m] = self._loss(y, targets[m])
                losses.append(pending[m].detach())
            else:
                loss = pending.pop(m)
                if loss.requires_grad:  # one of padding alone may be a constant
                    torch.autograd.backward(loss)
                stage.mark_computed("B", m, start)

    def _compute(self, x: Tensor, m: int) -> Tensor:
        """Raises RuntimeError for the model's ValueErrors, as torch does: settings have others."""
        try:
            return self._stage.compute(x, m)
        except ValueError as error:
            raise RuntimeError(f"the model failed in microbatch {m}: {error}") from error
