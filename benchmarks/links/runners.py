"""The methods of the link benchmark, and one rank's part of each.

Ours is set up as in `launch/build.py`; torch's own pipelining is used unchanged.

Axes: B samples of a microbatch, T tokens, D channels, S samples of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.links.workloads import PaperShape
from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.aqsgd.transform.config import GradientTransformConfig, TransformConfig
from thinpipe.launch.config.boundary import BackwardConfig, ForwardConfig
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.channel import IncomingChannel, Microbatch, OutgoingChannel, Pass
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.gloo_link import GlooLink
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.comm.transport import FIRST_CUT
from thinpipe.pipeline.config import DirectConfig, RawConfig, StatelessConfig
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.orders import DEPTH
from thinpipe.pipeline.schedule import CompressedStage, build_schedule
from thinpipe.pipeline.stage import Channels
from thinpipe.pipeline.wire.told import BACKWARD, FORWARD, ScheduleName

RUN_ID = 1
_RAW = RawConfig()


@dataclass(frozen=True)
class Method:
    """A method: a runtime, a schedule, and its boundaries.

    torch's runtime has no boundaries: it sends tensors of `dtype`. `depth` is that of Deep1F1B.
    """

    name: str
    runtime: Literal["thinpipe", "torch"]
    schedule: ScheduleName
    forward: ForwardConfig = _RAW
    backward: BackwardConfig = _RAW
    dtype: torch.dtype = torch.float32
    depth: int = DEPTH

    @property
    def remembers(self) -> bool:
        """Whether the first visit of a sample is sent differently."""
        return self.forward.remembers

    @property
    def warm_steps(self) -> int:
        """Steps that are discarded before the first rate: a basis is found after one, and sent."""
        return 5 if self.forward.learns else 1


def _ours(name: str, forward: ForwardConfig, backward: BackwardConfig) -> Method:
    return Method(name, "thinpipe", "Deep1F1B", forward, backward)


def _delta(forward_bits: int, backward_bits: int) -> Method:
    name = f"aqsgd fw{forward_bits}/bw{backward_bits}"
    forward = AqsgdConfig(bits=forward_bits, delta="uniform", first_visit=8)
    return _ours(name, forward, DirectConfig(bits=backward_bits))


def _transform(step: float, dimensions: tuple[float, float] = (1.0, 1.0)) -> Method:
    forward = TransformConfig(step=step, dimensions=dimensions[0])
    backward = GradientTransformConfig(step=step, dimensions=dimensions[1])
    left_out = "" if min(dimensions) == 1 else ", dimensions {}/{}".format(*dimensions)
    return _ours(f"transform {step}/{step}{left_out}", forward, backward)


METHODS = (
    _ours("fp32", RawConfig(), RawConfig()),
    _ours("bf16", RawConfig(format="bf16"), RawConfig(format="bf16")),
    _ours("direct fw3/bw6", DirectConfig(bits=3), DirectConfig(bits=6)),
    _ours("stateless fw4/bw6", StatelessConfig(bits=4), StatelessConfig(bits=6)),
    _delta(4, 8),
    _delta(3, 6),
    _delta(2, 4),
    _transform(0.6),
    _transform(0.8),
    _transform(0.7, (0.875, 0.6)),
    Method("torch GPipe fp32", "torch", "GPipe"),
    Method("torch GPipe bf16", "torch", "GPipe", dtype=torch.bfloat16),
    Method("torch 1F1B fp32", "torch", "1F1B"),
    Method("torch 1F1B bf16", "torch", "1F1B", dtype=torch.bfloat16),
)


class Runner(Protocol):
    """One rank's part of a method."""

    def step(self, number: int, ids_S: Tensor) -> None:
        """Run one step; a collective."""

    def take_sent(self) -> int:
        """Bytes sent since the last call."""


def make_runner(method: Method, workload: PaperShape, transport: GlooTransport) -> Runner:
    """This rank's end of a method; all ranks call it alike."""
    kind = TorchRunner if method.runtime == "torch" else ThinPipeRunner
    return kind(method, workload, transport)


class ThinPipeRunner:
    """Our stage and links, as in a training run."""

    def __init__(self, method: Method, workload: PaperShape, transport: GlooTransport) -> None:
        mesh = transport.mesh
        rank, stages = mesh.position, mesh.pipeline_ranks
        module = workload.module(rank, stages, torch.float32)
        wires = [_wire(method, workload, transport, *place) for place in _places(rank, stages)]
        inputs, outputs, gradients_in, gradients_out = wires
        channels = Channels(
            inputs and IncomingChannel(*inputs),
            outputs and OutgoingChannel(*outputs),
            gradients_in and IncomingChannel(*gradients_in),
            gradients_out and OutgoingChannel(*gradients_out),
        )
        self.stage = CompressedStage(
            module, rank, stages, channels=channels, group=transport.pipeline_group
        )
        self._schedule = build_schedule(
            method.schedule,
            [self.stage],
            workload.microbatches,
            loss=workload.loss,
            depth=method.depth,
        )
        self._module, self._mesh, self._workload, self._passes = module, mesh, workload, 0
        self._first_error = FirstError()

    def step(self, number: int, ids_S: Tensor) -> None:
        """Run one step and commit the boundaries' memories."""
        microbatches = [
            Microbatch(self._workload.boundary, Samples(ids_B))
            for ids_B in ids_S.tensor_split(self._workload.microbatches)
        ]
        self.stage.take_events()
        self.stage.begin_pass(Pass(self._passes, number, "train", microbatches, self._first_error))
        self._passes += 1
        self._module.begin_step(ids_S)
        _run_schedule(self._schedule, self._mesh, self._workload.batch(ids_S))
        self.stage.end_pass()
        for channel in self.stage.channels.all():
            channel.codec.training.finish_step(keep=True)

    def take_sent(self) -> int:
        """Bytes sent since the last call, headers included."""
        return sum(end.take_traffic().nbytes for end in self.stage.channels.outgoing())


class TorchRunner:
    """torch.distributed.pipelining, unchanged."""

    def __init__(self, method: Method, workload: PaperShape, transport: GlooTransport) -> None:
        mesh = transport.mesh
        rank, stages = mesh.position, mesh.pipeline_ranks
        module = workload.module(rank, stages, method.dtype)
        stage = PipelineStage(
            module, rank, stages, torch.device("cpu"), group=transport.pipeline_group
        )
        kind = getattr(schedules, f"Schedule{method.schedule}")
        self._schedule = kind(stage, workload.microbatches, loss_fn=workload.loss)
        self._mesh, self._workload = mesh, workload
        neighbours = (rank > 0) + (rank < stages - 1)
        numel = workload.boundary.numel() * workload.microbatches * neighbours
        self._step_nbytes, self._sent = numel * method.dtype.itemsize, 0

    def step(self, number: int, ids_S: Tensor) -> None:
        _run_schedule(self._schedule, self._mesh, self._workload.batch(ids_S))
        self._sent += self._step_nbytes

    def take_sent(self) -> int:
        """Bytes of the tensors sent since the last call, computed: torch does not count them."""
        sent, self._sent = self._sent, 0
        return sent


def _run_schedule(schedule: Any, mesh: Mesh, batch: tuple[Tensor, Tensor]) -> None:
    inputs = (batch[0],) if mesh.position == 0 else ()
    is_last = mesh.position == mesh.pipeline_ranks - 1
    schedule.step(*inputs, return_outputs=False, **({"target": batch[1]} if is_last else {}))


def _places(rank: int, stages: int) -> Sequence[tuple[int, int, int]]:
    """(upper stage, direction, number of stages) of activations in, out, gradients in, out."""
    places = ((rank - 1, FORWARD), (rank, FORWARD), (rank, BACKWARD), (rank - 1, BACKWARD))
    return [(*place, stages) for place in places]


def _wire(
    method: Method,
    workload: PaperShape,
    transport: GlooTransport,
    upper: int,
    direction: int,
    stages: int,
) -> tuple[MessageCodec, GlooLink] | None:
    """Codec and link of the cut below a stage; None at the ends of the pipeline."""
    if upper < 0 or upper + 1 >= stages:
        return None
    mesh = transport.mesh
    link = transport.link(
        mesh.rank_at(upper + 1 if mesh.position == upper else upper),
        FIRST_CUT + 2 * upper + direction,
        f"{method.name}: stage {upper} - stage {upper + 1}",
    )
    spec = method.forward if direction == FORWARD else method.backward
    key = (upper + 1) << 32 | direction
    codec = MessageCodec(
        cut=upper + 1,
        direction=direction,
        boundaries=spec.build(width=workload.boundary[-1], key=key),
        run_id=RUN_ID,
    )
    return codec, link
