"""The paper-shaped pipeline of the link benchmark, as one rank runs it.

Everything is real (schedule, codecs, headers, gloo over kernel TCP) except the compute, which is
slept at the times of the published setting: GPT2-XL on V100-class devices, boundaries of 1024 x
1600 values per microbatch of one sample. So two processor cores suffice for several stages, and
what is measured is schedule, overlap, codec and link.

Axes: B samples, T tokens, D channels, M microbatches.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from aqsgd.config import AqsgdConfig
from launch.build import build_boundary
from launch.config import BackwardConfig, ForwardConfig
from pipeline.channel import BACKWARD, FORWARD, Channel
from pipeline.config import DirectConfig, RawConfig
from pipeline.link import GroupLink, Link
from pipeline.mesh import Mesh, build_mesh
from pipeline.samples import Samples
from pipeline.schedule import ScheduleName, build_schedule
from pipeline.stage import Channels, CompressedStage, Microbatch

RUN_ID = 1
_TIMEOUT_S = 120.0
_MARGIN_S = 0.05
_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")  # of a host, not the machine


@dataclass(frozen=True)
class Shape:
    """Sizes of a step; a microbatch is one sample. Seconds are those of one microbatch."""

    tokens: int = 1024
    width: int = 1600
    microbatches: int = 8
    forward_s: float = 0.072
    backward_s: float = 0.144

    @property
    def boundary(self) -> torch.Size:
        """Shape of what crosses a cut."""
        return torch.Size((1, self.tokens, self.width))


@dataclass(frozen=True)
class Method:
    """One way to run the step: ours with two boundary settings, or torch's own stage."""

    name: str
    schedule: ScheduleName
    forward: ForwardConfig | None = None
    backward: BackwardConfig | None = None
    dtype: torch.dtype = torch.float32

    @property
    def runner(self) -> Literal["thinpipe", "torch"]:
        """Whose stage runs it."""
        return "torch" if self.forward is None else "thinpipe"

    @property
    def remembers(self) -> bool:
        """Whether the first visit of a sample is sent differently."""
        return isinstance(self.forward, AqsgdConfig)


def _ours(name: str, forward: ForwardConfig, backward: BackwardConfig) -> Method:
    return Method(name, "Deep1F1B", forward, backward)


def _delta(forward_bits: int, backward_bits: int) -> Method:
    name = f"aqsgd fw{forward_bits}/bw{backward_bits}"
    return _ours(name, AqsgdConfig(bits=forward_bits), DirectConfig(bits=backward_bits))


METHODS = (
    _ours("fp32", RawConfig(), RawConfig()),
    _ours("bf16", RawConfig(format="bf16"), RawConfig(format="bf16")),
    _ours("direct fw3/bw6", DirectConfig(bits=3), DirectConfig(bits=6)),
    _delta(3, 6),
    _delta(2, 4),
    Method("torch GPipe fp32", "GPipe"),
    Method("torch GPipe bf16", "GPipe", dtype=torch.bfloat16),
    Method("torch 1F1B fp32", "1F1B"),
    Method("torch 1F1B bf16", "1F1B", dtype=torch.bfloat16),
)


@dataclass(frozen=True)
class RankResult:
    """What one rank saw of a method at one rate.

    `steps_s` are from the common start to this rank's end. `first_visit_s` is the step in which no
    sample was known, None for methods without memory. `nbytes` are those that the rank sent in one
    later step, our headers included.
    """

    method: str
    rate_bps: float | None
    steps_s: tuple[float, ...]
    first_visit_s: float | None
    nbytes: int


class Runner(Protocol):
    """One rank's end of a method."""

    def step(self, number: int, ids_B: Tensor) -> None:
        """Run one step; all ranks call it alike."""

    def take_sent(self) -> int:
        """Bytes sent since the last call."""


class _Sleep(torch.autograd.Function):
    """Takes as long as a stage, and returns values of the right shape."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x_BTD: Tensor, stage: "SleptStage") -> Tensor:
        ctx.stage = stage
        time.sleep(stage.shape.forward_s)
        return stage.next_output()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(ctx.stage.shape.backward_s)
        gradient_BTD = ctx.stage.gradient_BTD.detach() if ctx.needs_input_grad[1] else None
        return torch.zeros(1), gradient_BTD, None


class SleptStage(nn.Module):
    """A stage whose compute is slept. The last one returns one number, for a loss that is free."""

    def __init__(self, shape: Shape, *, is_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self._calls = shape, 0
        self.weight = nn.Parameter(torch.zeros(1))
        size = torch.Size((1, 1)) if is_last else shape.boundary
        self._outputs = [torch.randn(size).to(dtype) for _ in range(3)]  # no sample stands still
        self.gradient_BTD = torch.randn(shape.boundary).to(dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Sleep and return an activation."""
        y_BTD: Tensor = _Sleep.apply(self.weight, x_BTD, self)  # type: ignore[no-untyped-call]
        return y_BTD

    def next_output(self) -> Tensor:
        """A tensor of its own over one of three buffers."""
        self._calls += 1
        return self._outputs[self._calls % 3].detach()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).sum()


def _run_schedule(schedule: Any, mesh: Mesh, microbatches: int) -> None:
    inputs = (torch.zeros(microbatches, 1),) if mesh.position == 0 else ()
    is_last = mesh.position == mesh.pipeline_ranks - 1
    schedule.step(*inputs, **({"target": torch.zeros(microbatches, 1)} if is_last else {}))


class ThinPipeRunner:
    """Our stage over our links, as a training run builds them."""

    def __init__(self, method: Method, shape: Shape, mesh: Mesh) -> None:
        rank, stages = mesh.position, mesh.pipeline_ranks
        module = SleptStage(shape, is_last=rank == stages - 1, dtype=torch.float32)
        channels = Channels(
            activations_in=_group_channel(method, shape, mesh, (rank - 1, rank), FORWARD),
            activations_out=_group_channel(method, shape, mesh, (rank, rank + 1), FORWARD),
            gradients_in=_group_channel(method, shape, mesh, (rank, rank + 1), BACKWARD),
            gradients_out=_group_channel(method, shape, mesh, (rank - 1, rank), BACKWARD),
        )
        self._stage = CompressedStage(module, rank, stages, channels=channels, group=mesh.forward)
        self._schedule = build_schedule(
            method.schedule, [self._stage], shape.microbatches, loss=_loss, depth=1
        )
        self._mesh, self._shape, self._passes = mesh, shape, 0

    def step(self, number: int, ids_B: Tensor) -> None:
        """Run one step and let the boundaries keep what they learned."""
        microbatches = [
            Microbatch(self._shape.boundary, Samples(id_1))
            for id_1 in ids_B.tensor_split(len(ids_B))
        ]
        self._stage.begin_pass(self._passes, microbatches, step=number, mode="train")
        self._passes += 1
        _run_schedule(self._schedule, self._mesh, self._shape.microbatches)
        for channel in self._stage.channels.all():
            channel.finish_step(keep=True)
        self._stage.take_events()

    def take_sent(self) -> int:
        """Bytes sent since the last call, headers included."""
        return sum(channel.take_traffic().nbytes for channel in self._stage.channels.all())


class TorchRunner:
    """torch.distributed.pipelining as it comes."""

    def __init__(self, method: Method, shape: Shape, mesh: Mesh) -> None:
        rank, stages = mesh.position, mesh.pipeline_ranks
        module = SleptStage(shape, is_last=rank == stages - 1, dtype=method.dtype)
        stage = PipelineStage(module, rank, stages, torch.device("cpu"), group=mesh.forward)
        kind = getattr(schedules, f"Schedule{method.schedule}")
        self._schedule = kind(stage, shape.microbatches, loss_fn=_loss)
        self._mesh, self._shape = mesh, shape
        neighbours = (rank > 0) + (rank < stages - 1)
        numel = shape.boundary.numel() * shape.microbatches * neighbours
        self._step_nbytes, self._sent = numel * method.dtype.itemsize, 0

    def step(self, number: int, ids_B: Tensor) -> None:
        """Run one step."""
        _run_schedule(self._schedule, self._mesh, self._shape.microbatches)
        self._sent += self._step_nbytes

    def take_sent(self) -> int:
        """Bytes of the tensors sent since the last call, computed: torch does not count them."""
        sent, self._sent = self._sent, 0
        return sent


def make_channel(method: Method, shape: Shape, *, link: Link, cut: int, direction: int) -> Channel:
    """One end of one direction of a cut, with the boundary of the method."""
    spec = method.forward if direction == FORWARD else method.backward
    assert spec is not None
    key = cut << 32 | direction
    return Channel(
        cut=cut,
        direction=direction,
        link=link,
        boundaries=build_boundary(spec, width=shape.width, key=key),
        run_id=RUN_ID,
    )


def _group_channel(
    method: Method, shape: Shape, mesh: Mesh, stages: tuple[int, int], direction: int
) -> Channel | None:
    """This rank's end of the cut between two stages; None at the ends of the pipeline."""
    upper, lower = stages
    if upper < 0 or lower >= mesh.pipeline_ranks:
        return None
    link = GroupLink(
        group=mesh.forward if direction == FORWARD else mesh.backward,
        peer=lower if mesh.position == upper else upper,
        channel=lower,
        name=f"{method.name}: stage {upper} - stage {lower}",
    )
    return make_channel(method, shape, link=link, cut=lower, direction=direction)


@dataclass(frozen=True)
class Plan:
    """What all ranks measure, in this order: every rate, every method, that many steps.

    With `keep_window` TCP on the emulated hosts does not start slowly after a pause.
    """

    shape: Shape
    methods: Sequence[Method]
    rates: Sequence[float | None]
    steps: int
    delay_s: float = 0.0
    keep_window: bool = False


SetRate = Callable[[float | None], None]


def run_host(host: int, plan: Plan, set_rate: SetRate) -> list[RankResult]:
    """Measure as one host of an emulated network."""
    if plan.keep_window:
        _SLOW_START.write_text("0")
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        return run_rank(plan, set_rate)
    finally:
        dist.destroy_process_group()


def run_rank(plan: Plan, set_rate: SetRate) -> list[RankResult]:
    """Measure as one rank of the default group; rank 0 calls `set_rate` and prints steps.

    Before the first rate every method runs a step that is not counted.
    """
    mesh = build_mesh(dist.get_world_size(), 1, timeout_s=_TIMEOUT_S)
    bench = _RankBench(mesh, plan)
    runners = {method: bench.runner(method) for method in plan.methods}
    for runner in runners.values():
        bench.step(runner, _ids(plan.shape, 0))
    results = []
    for number, rate_bps in enumerate(plan.rates, start=1):
        if mesh.rank == 0:
            set_rate(rate_bps)
        ids_B = _ids(plan.shape, number)
        results += [bench.measure(method, runners[method], ids_B, rate_bps) for method in runners]
    bench.wait_for_all()
    return results


def _ids(shape: Shape, number: int) -> Tensor:
    """Samples that were not met before, for each number."""
    return torch.arange(shape.microbatches) + number * shape.microbatches


class _RankBench:
    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self._mesh, self._plan = mesh, plan
        self._margin_s = _MARGIN_S + 2 * plan.delay_s
        self._number = 0

    def runner(self, method: Method) -> Runner:
        kind = TorchRunner if method.runner == "torch" else ThinPipeRunner
        return kind(method, self._plan.shape, self._mesh)

    def measure(
        self, method: Method, runner: Runner, ids_B: Tensor, rate_bps: float | None
    ) -> RankResult:
        first_visit_s = self.step(runner, ids_B) if method.remembers else None
        runner.take_sent()
        steps_s = tuple(self.step(runner, ids_B) for _ in range(self._plan.steps))
        nbytes = runner.take_sent() // self._plan.steps
        if self._mesh.rank == 0:
            print(
                f"{method.name} at {rate_bps} bit/s: {[round(s, 3) for s in steps_s]} s", flush=True
            )
        return RankResult(method.name, rate_bps, steps_s, first_visit_s, nbytes)

    def step(self, runner: Runner, ids_B: Tensor) -> float:
        """Seconds from the common start to the end of this rank."""
        self._number += 1
        begin_s = self.wait_for_all() + self._margin_s
        time.sleep(max(0.0, begin_s - time.perf_counter()))
        runner.step(self._number, ids_B)
        return time.perf_counter() - begin_s

    def wait_for_all(self) -> float:
        """When the last rank came here; the hosts share this machine's clock."""
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        return float(self._mesh.share(now).max())
