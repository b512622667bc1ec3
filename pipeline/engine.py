"""Training and evaluation steps over the stages of this rank.

A step runs the schedule over its microbatches once per accumulation part, lets the replicas
exchange, sums the gradients of tied weights, and then shares one small vector with every rank:
loss, gradient norm, traffic and busy time. From it every rank clips alike, and skips alike when
something is not finite.

Axes: B samples, T tokens, D channels.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Batch, PyTree, moved, split_samples, take_samples
from thinpipe.pipeline.cache_consistency import Repaired
from thinpipe.pipeline.comm.channel import Channel, Microbatch, Pass
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.comm.guard import CutDirection, Guard
from thinpipe.pipeline.comm.message import Mode
from thinpipe.pipeline.comm.tied import TiedWeight
from thinpipe.pipeline.comm.transport import Scope, Transport
from thinpipe.pipeline.evaluation import evaluate, evaluating
from thinpipe.pipeline.loss import NextToken, Objective
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.metrics import Measures
from thinpipe.pipeline.orders import DEPTH, fit_microbatches, single_stage_order
from thinpipe.pipeline.precision import Precision
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.shards import Shards
from thinpipe.pipeline.stage import MicrobatchLoop, Stage
from thinpipe.pipeline.step_stats import RankStep, StepStats, StepTotals, square_norm
from thinpipe.pipeline.wire.told import BACKWARD, DIRECTIONS, ComputeEvent, ScheduleName

_NO_IDS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class EngineOptions:
    """How a step is run.

    `cuts` are all cuts of the pipeline, `hidden` is D, the width there; `tokens(inputs)` is T, by
    default as many as inputs have, and `longest` the T of all messages where caches need one.
    `with_inputs`: stages are given the inputs, each of them. `clip_norm` limits the gradient norm
    over all stages, 0 leaves it alone; `guarded` are the directions that the guard judges, with
    what to use where a codec is wrong. With `offload` a GPU holds less (`models/offload.py`). With
    `share_casts` microbatches share weights cast to bf16.
    """

    schedule: ScheduleName
    microbatches: int
    cuts: tuple[int, ...]
    hidden: int
    tokens: Callable[[PyTree], int] | None = None
    longest: int | None = None
    with_inputs: bool = False
    depth: int = DEPTH
    accumulate: int = 1
    clip_norm: float = 0.0
    precision: Precision = "fp32"
    share_casts: bool = True
    offload: bool = False
    objective: Objective = field(default_factory=NextToken)
    guarded: Mapping[CutDirection, str] = field(default_factory=dict)


class PipelineEngine:
    """Runs steps on the stages that live on this rank; all ranks call the same methods alike."""

    def __init__(  # noqa: PLR0913  what a step is made of
        self,
        stages: Sequence[Stage],
        transport: Transport,
        options: EngineOptions,
        *,
        optimizer: torch.optim.Optimizer,
        sync: ReplicaSync,
        tied: TiedWeight | None = None,
        shards: Shards | None = None,
        make_schedule: Callable[..., Any] | None = None,
    ) -> None:
        """`make_schedule` has the signature of `build_schedule`, which is the default."""
        self._stages = {stage.stage_index: stage for stage in stages}
        self.channels: list[Channel] = [end for stage in stages for end in stage.channels.all()]
        self.transport, self._options, self.objective = transport, options, options.objective
        self._first_error = FirstError()  # stages of a rank wait for each other
        self._optimizer, self._sync, self.tied = optimizer, sync, tied
        self._step_optimizer: Callable[[], object] = optimizer.step
        self._kept: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if options.offload:
            from thinpipe.pipeline.models.offload import ActivationsInRam, StateInRam

            device = stages[0].device
            self._step_optimizer = StateInRam(optimizer, device).step
            self._kept = ActivationsInRam([stage.submod for stage in stages], device)
        self._shards = shards
        modules: list[Any] = [stage.submod for stage in stages]
        every = [parameter for module in modules for parameter in module.parameters()]
        self._parameters = list(dict.fromkeys(every))
        split = any(getattr(module, "whole_backward_only", False) for module in modules)
        # a parameter that stages share gets several gradients of a microbatch
        self._once_per_microbatch = len(self._parameters) == len(every) and not split
        self._given_schedule = make_schedule
        self._device: torch.device = stages[0].device
        self._stats = StepStats(transport, self.channels, options.cuts, loss_scope=sync.loss_scope)
        self._guard = Guard(options.guarded)
        self._cached_gradients = [
            channel.codec
            for channel in self.channels
            if channel.codec.direction == BACKWARD
            and (memory := channel.codec.memory) is not None
            and memory.caches
        ]
        self._schedules: dict[int, Any] = {}
        self._denominator = 1.0
        self.passes = -1
        """The number of the last pass."""
        self._own_ids_B: Tensor | None = None
        self._targets: PyTree = None

    def begin(self, ids_B: Tensor, first_ids_B: Tensor, samples: int = 0) -> Repaired:
        """Let the ends of every cut agree on their activation caches, before the first step.

        `ids_B` are all samples of this replica (none: a stream's are not known), `first_ids_B`
        those of the first step; it may have `samples` later, if that is more. Returns the samples
        whose cached rows differed or were lost, and are dropped.

        Raises:
            OSError: there is no room for the activation caches.
        """
        self.announce(ids_B)
        repaired = self._stats.consistency.begin(ids_B, first_ids_B, samples)
        self._finish_step(keep=False)  # what was fetched is there for the first step
        return repaired

    def go_on(self, next_ids_B: Tensor, samples: int, *, anew: bool) -> None:
        """As `begin`, before a step after `regroup`; all ranks of a replica call it.

        `anew`: they are of other replicas, and caches begin empty.

        Raises:
            OSError: there is no room for the activation caches.
        """
        assert self._own_ids_B is not None, "a stream does not go on"
        self._stats.consistency.go_on(self._own_ids_B, next_ids_B, samples, anew=anew)
        self._finish_step(keep=False)

    def announce(self, ids_B: Tensor) -> None:
        """All samples of this replica from now on; none: they are not known."""
        self._own_ids_B = ids_B if len(ids_B) else None

    def close(self) -> None:
        self._stats.consistency.release()

    def train_step(self, batch: Batch, step: int, upcoming_B: Tensor = _NO_IDS) -> StepTotals:
        """Run one optimizer step; ranks that wait for each other in it get the same totals.

        `upcoming_B` are this replica's samples of the next step: activation caches fetch them
        meanwhile, and both ends of each cut agree on them.

        Raises:
            ValueError: the batch is empty, holds an id twice, or one that `begin` did not announce.
            TransportError, DesyncError: a peer failed; the run must be restarted from a checkpoint.
        """
        batch.check(self._own_ids_B)
        self.take_events()
        self._stats.begin_step(batch.ids_B, upcoming_B)
        start = time.perf_counter()
        parts = batch.split(min(self._options.accumulate, len(batch)))
        microbatches = sum(self._fit(len(part)) for part in parts)
        if self._shards is not None:
            self._sync.begin_step(step, 1)  # gradients are there when they are sums over the shards
            self._shards.begin_step(step, microbatches)
        else:
            # a bucket leaves during the last backward; 0: after it, as some parameters get several
            self._sync.begin_step(step, microbatches if self._once_per_microbatch else 0)
        self._denominator = 0.0
        losses = [loss for part in parts for loss in self._train_part(part, step, batch)]
        if self._shards is not None:
            self._shards.before_step()
        self._sync.before_step()
        if self.tied is not None:
            self.tied.sum_gradients()
        own = RankStep(
            # in double precision, in order; a GPU is waited for once
            loss=sum(torch.stack(losses).tolist()) if losses else 0.0,
            tokens=self.objective.count(batch.targets),
            square_norm=self._square_norm(),
            seconds=time.perf_counter() - start,
            sent=self._sent(),
            events=[event for stage in self._stages.values() for event in stage.events()],
        )
        scope: Scope = "world" if self._sync.due(step) else "replica"
        return self._finished(self._stats.share(own, scope))

    @property
    def last_shared(self) -> Tensor:
        """[W, N]: what ranks shared at the end of the last step that was finished here."""
        return self._stats.shared_WN

    def finish_step(self, shared_WN: Tensor, mesh: Mesh, scope: Scope) -> StepTotals:
        """Finish a step in which only the last exchange failed; `shared_WN` is of who had it.

        `mesh` is that of the step, before a replica was lost, and `scope` says who shared.
        """
        return self._finished(self._stats.taken_over(shared_WN, mesh, scope))

    def abandon_pass(self) -> None:
        """Wait until this rank's threads have nothing to do, and forget the pass under way."""
        for stage in self._stages.values():
            stage.abandon_pass()
        self._first_error = FirstError()
        self._schedules.clear()

    def regroup(self, ids_B: Tensor, passes: int) -> None:
        """Go on in the transport's new groups, with these samples, after pass `passes`."""
        self.announce(ids_B)
        self.passes = passes
        for stage in self._stages.values():
            stage.regroup(self.transport.pipeline_group)
        if self.tied is not None:
            self.tied.restart()

    def abandon_step(self) -> None:
        """Forget what was computed since `train_step` began; it can be called again then."""
        self._finish_step(keep=False)
        self._optimizer.zero_grad(set_to_none=True)

    def _finished(self, totals: StepTotals) -> StepTotals:
        self._apply(totals)
        measured = {(w.cut, DIRECTIONS.index(w.direction)): w for w in totals.wire}
        return replace(totals, notes=tuple(self._guard.judge(measured)))

    def eval_step(
        self, batch: Batch, step: int, *, compressed: bool, measures: Measures | None = None
    ) -> tuple[float, float]:
        """Loss sum and count, the same on every rank; `measures` count what this one sees.

        Never touches activation caches. Pass every replica its own samples; sums are over all.
        """
        mode: Mode = "eval_compressed" if compressed else "eval"
        own = torch.zeros(2, dtype=torch.float64)
        parts = min(self._options.microbatches, len(batch))
        modules = [stage.submod for stage in self._stages.values()]
        if parts:
            self._begin_pass(batch, parts, step, mode)
        with evaluating(modules, self._shards), self._sync.global_parameters(), self._autocast():
            if parts:  # else other replicas took what was left, and may need this one's parameters
                targets = split_samples(moved(batch.targets, self._device), parts)
                inputs = self._first_inputs(batch).tensor_split(parts)
                measures = measures or Measures({})
                own = evaluate(self._stages, inputs, targets, self.objective, measures)
        loss, count = self.transport.share(own, "world").sum(0).tolist()
        return loss, count

    def take_events(self) -> list[ComputeEvent]:
        return [event for stage in self._stages.values() for event in stage.take_events()]

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self.passes, "guard": self._guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes = state["pass"]
        self._guard.load_state_dict(state.get("guard", {}))

    def _train_part(self, part: Batch, step: int, batch: Batch) -> list[Tensor]:
        count = self._fit(len(part))
        if count not in self._schedules:  # they are made for one number of microbatches
            self._schedules[count] = self._make_schedule(count)
        schedule = self._schedules[count]
        self._begin_pass(part, count, step, "train", schedule)
        if not self._denominator:  # the first part; its receives are posted meanwhile
            self._denominator = self._count_tokens(batch)
            for codec in self._cached_gradients:
                codec.scale = self._denominator  # caches hold gradients of a sample's own losses
        inputs = (self._first_inputs(part),) if 0 in self._stages else ()
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {}
        if any(stage.is_last for stage in self._stages.values()):
            self._targets = moved(part.targets, self._device)
            target = self._targets
            if not isinstance(target, Tensor):  # which torch's schedules could not split
                target = torch.arange(len(part), device=self._device)
            arguments = {"target": target, "losses": losses}
        with self._autocast(), self._kept:
            schedule.step(*inputs, return_outputs=False, **arguments)
        for stage in self._stages.values():
            stage.end_pass()
        return [loss.detach() for loss in losses]

    def _first_inputs(self, batch: Batch) -> Tensor:
        """What the first stage is called with; ids, if its samples tell it the inputs."""
        inputs: PyTree = batch.ids_B if self._options.with_inputs else batch.inputs_BT
        found: Tensor = inputs.to(self._device)
        return found

    def _begin_pass(
        self, batch: Batch, count: int, step: int, mode: Mode, schedule: Any = None
    ) -> None:
        self.passes += 1
        options, inputs = self._options, batch.inputs_BT
        tokens = inputs.shape[1] if options.tokens is None else options.tokens(inputs)
        longest = options.longest or tokens
        if tokens > longest:
            raise ValueError(
                f"a batch of {tokens} tokens is longer than the {longest} that the activation "
                "caches have room for; say how long the longest is: run.batches(..., longest=...)"
            )
        microbatches = [
            Microbatch(
                torch.Size((len(part), longest, options.hidden)),
                replace(part.samples, given=part.inputs_BT)
                if options.with_inputs
                else part.samples,
                tokens,
            )
            for part in batch.split(count)
        ]
        this = Pass(self.passes, step, mode, microbatches, self._first_error)
        for index, stage in self._stages.items():
            order = None
            if schedule is not None and options.cuts:
                from thinpipe.pipeline.schedule import pass_order  # imports torch's pipelining

                order = pass_order(schedule, index)
            stage.begin_pass(this, order)

    def _apply(self, totals: StepTotals) -> None:
        self._sync.commit()
        if not totals.skipped:
            limit, norm = self._options.clip_norm, totals.grad_norm
            if self._sync.leaves == "gradients" and 0 < limit < norm:
                gradients = [p.grad for p in self._parameters if p.grad is not None]
                # 1e-6 as in torch's clip_grad_norm_, so that clipped steps equal a torch loop's
                torch._foreach_mul_(gradients, limit / (norm + 1e-6))
            self._step_optimizer()
            self._sync.after_step()
        self._finish_step(keep=not totals.skipped)
        self._optimizer.zero_grad(set_to_none=True)

    def _finish_step(self, *, keep: bool) -> None:
        for channel in self.channels:
            channel.codec.training.finish_step(keep=keep)

    def _square_norm(self) -> float:
        """Square of this rank's part of the gradient norm; a tied weight counts on one rank."""
        copy = self.tied.weight if self.tied and not self.tied.is_first else None
        gradients = [p.grad for p in self._parameters if p.grad is not None and p is not copy]
        return square_norm(gradients)

    def _sent(self) -> tuple[int, int, int]:
        exchanged = self._sync.bytes_sent + (self.tied.nbytes_sent if self.tied else 0)
        if self._shards is None:
            return exchanged, 0, 0
        return exchanged, self._shards.weight_bytes, self._shards.gradient_bytes

    def _count_tokens(self, batch: Batch) -> float:
        """Divisor of losses; only ranks that need it ask other replicas."""
        tokens = torch.tensor([self.objective.count(batch.targets)], dtype=torch.float64)
        needed = any(stage.is_last for stage in self._stages.values()) or self._cached_gradients
        scope: Scope = "stage" if self._sync.loss_scope == "global" else "shards"
        if needed and (scope == "stage" or self._shards is not None):
            tokens = self.transport.share(tokens, scope).sum(0)
        return max(float(tokens), 1.0)  # a batch of padding alone has no target

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not isinstance(self._targets, Tensor):
            targets = take_samples(self._targets, targets)
        return self.objective.loss_sum(logits, targets) / self._denominator

    def _make_schedule(self, count: int) -> Any:
        name, make = self._options.schedule, self._given_schedule
        stages: list[Any] = [*self._stages.values()]
        if make is None and not self._options.cuts:
            order = single_stage_order(name, 0, stages=1, microbatches=count)
            return MicrobatchLoop(stages[0], order, self._loss)
        if make is None:
            from thinpipe.pipeline.schedule import build_schedule  # imports torch's pipelining

            make = build_schedule
        return make(name, stages, count, loss=self._loss, depth=self._options.depth)

    def _fit(self, samples: int) -> int:
        return fit_microbatches(
            self._options.schedule,
            wanted=self._options.microbatches,
            samples=samples,
            ranks=self.transport.mesh.pipeline_ranks,
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self._device.type,
            torch.bfloat16,
            enabled=self._options.precision == "bf16",
            cache_enabled=self._options.share_casts,
        )
