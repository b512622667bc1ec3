"""One rank of a group of replicas: compute is slept, what replicas exchange is real.

Codecs, messages, threads and gloo over kernel TCP are those of a training run; so are the cuts of
the end-to-end form, whose stages are those of `benchmarks.links.workloads`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.links.ranks import SetRate, default_group, keep_windows, when_all_arrived
from benchmarks.links.runners import Method as Cuts
from benchmarks.links.runners import ThinPipeRunner
from benchmarks.links.workloads import PaperShape
from benchmarks.replicas.training import Adam
from thinpipe.gradcomp.registry import build_optimizer, load_method, parse_options
from thinpipe.launch.host.links import format_rate
from thinpipe.pipeline.comm.gloo import GlooTransport

_TIMEOUT_S = 300.0
_MARGIN_S = 0.1
_MATRIX = (256, 250)
DDP = "torch DDP"
"""The name of a method that is not ours; its options are `mb`, of a bucket, and `dtype`."""


@dataclass(frozen=True)
class Method:
    """How replicas exchange, and what crosses the cut if there is one."""

    label: str
    name: str
    options: dict[str, Any]
    cuts: Cuts | None = None


@dataclass(frozen=True)
class Plan:
    """What all ranks measure, in this order: every rate, every method, that many steps.

    `parameters` are those of one rank. Without `shape` a replica is one rank, and a step sleeps
    `compute_s`.
    """

    methods: Sequence[Method]
    rates: Sequence[float | None]
    steps: int
    parameters: int
    compute_s: float
    shape: PaperShape | None = None
    replicas: int = 2
    stages: int = 2
    new_samples: bool = False
    """In every step, as in the only epoch of a run."""

    @property
    def pipeline_ranks(self) -> int:
        """Ranks of one replica."""
        return 1 if self.shape is None else self.stages


@dataclass(frozen=True)
class RankResult:
    """Seconds of each step on one rank, and what it sent to its replicas in one."""

    method: str
    rate_bps: float | None
    steps_s: tuple[float, ...]
    sync_nbytes: int
    cut_nbytes: int


class _Runner:
    """One method on one rank."""

    def __init__(self, method: Method, plan: Plan, transport: GlooTransport) -> None:
        generator = torch.Generator().manual_seed(transport.mesh.rank)
        self._weights = [nn.Parameter(torch.zeros(shape)) for shape in _shapes(plan.parameters)]
        self._updates = [
            1e-3 * torch.randn(weight.shape, generator=generator) for weight in self._weights
        ]
        options = parse_options(method.name, method.options)
        peers = transport.peers("copies")
        self.sync = load_method(method.name).build(options, self._weights, peers)
        build_optimizer(
            method.name, options, self._weights, Adam(lr=1e-3), self.sync
        )  # some follow
        self._plan, self.number = plan, 0
        self._pipeline = None
        if plan.shape is not None:
            assert method.cuts is not None
            self._pipeline = ThinPipeRunner(method.cuts, plan.shape, transport)

    def step(self) -> None:
        """Compute, exchange, optimize."""
        self.sync.begin_step(self.number, 0)
        if self._pipeline is None:
            time.sleep(self._plan.compute_s)
        else:
            assert self._plan.shape is not None
            samples = self._plan.shape.microbatches * self._plan.shape.samples
            first = self.number * samples if self._plan.new_samples else 0
            self._pipeline.step(self.number, torch.arange(first, first + samples))
        for weight, update in zip(self._weights, self._updates, strict=True):
            weight.grad = update.clone()
        self.sync.before_step()
        self.sync.commit()
        with torch.no_grad():
            for weight in self._weights:
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.1)
                weight.grad = None
        self.sync.after_step()
        self.number += 1

    def take_sent(self) -> tuple[int, int]:
        """Bytes to replicas since the start, bytes over the cut since the last call."""
        cut = 0 if self._pipeline is None else self._pipeline.take_sent()
        return self.sync.bytes_sent, cut


class _DdpRunner:
    """torch's DistributedDataParallel; its hook for bf16 rejects CPUs, so weights are in bf16."""

    def __init__(self, method: Method, plan: Plan, transport: GlooTransport) -> None:
        shapes, dtype = _shapes(plan.parameters), method.options["dtype"]
        weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        self.sync, self.number, self._compute_s = _DdpSync(), 0, plan.compute_s
        self._model = DistributedDataParallel(_Sum(weights), bucket_cap_mb=method.options["mb"])

    def step(self) -> None:
        time.sleep(self._compute_s)
        torch.autograd.backward(self._model())
        with torch.no_grad():
            for weight in self._model.parameters():
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.1)
                weight.grad = None
        self.number += 1

    def take_sent(self) -> tuple[int, int]:
        """Bytes that left this process's host, and none over a cut."""
        return sent_nbytes(), 0


class _Sum(nn.Module):
    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._weights = nn.ParameterList(weights)

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self._weights]).sum()


class _DdpSync:
    """What replicas ask of an exchange, of DDP's: it is over when a backward ends."""

    def due(self, number: int) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}


def sent_nbytes() -> int:
    """Bytes that have left this process's host, TCP's headers included."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    return sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")


def run_host(host: int, plan: Plan, set_rate: SetRate = lambda _: None) -> list[RankResult]:
    """Measure as one host of an emulated network."""
    torch.set_num_threads(1)
    if plan.shape is not None:
        keep_windows()
    with default_group(_TIMEOUT_S):
        return run_rank(plan, set_rate)


def run_rank(plan: Plan, set_rate: SetRate) -> list[RankResult]:
    """Measure as one rank of the default group; rank 0 calls `set_rate`.

    Before the measured steps every method makes two or more, so that codecs are compiled, memories
    are warm and a delayed exchange is under way.
    """
    transport = GlooTransport(plan.pipeline_ranks, plan.replicas, timeout_s=_TIMEOUT_S)
    results = []
    for method in plan.methods:
        kind = _DdpRunner if method.name == DDP else _Runner
        runner: Any = kind(method, plan, transport)
        for rate_bps in plan.rates:
            if transport.mesh.rank == 0:
                set_rate(rate_bps)
            _together(transport)
            for _ in range(2 if method.cuts is None else max(2, method.cuts.warm_steps)):
                runner.step()
            runner.sync.state_dict()
            before, _ = runner.take_sent()
            steps_s = tuple(_timed(runner, transport) for _ in range(plan.steps))
            runner.sync.state_dict()  # waits for what is under way
            after, cut = runner.take_sent()
            results.append(
                RankResult(
                    method.label,
                    rate_bps,
                    steps_s,
                    (after - before) // plan.steps,
                    cut // plan.steps,
                )
            )
            if transport.mesh.rank == 0:
                rounded = [round(step_s, 3) for step_s in steps_s]
                print(f"{method.label}, {format_rate(rate_bps)}: {rounded} s", flush=True)
        _together(transport)
    return results


def _timed(runner: Any, transport: GlooTransport) -> float:
    """Seconds of a step; steps follow each other at once, as they do in training."""
    begin_s, number = time.perf_counter(), runner.number
    runner.step()
    if runner.sync.due(number):  # as in training, where ranks share losses then
        transport.share(torch.zeros(1), "world")
    return time.perf_counter() - begin_s


def _shapes(parameters: int) -> list[tuple[int, ...]]:
    """Matrices, as of a transformer, and a vector of what is left."""
    matrices, left = divmod(parameters, math.prod(_MATRIX))
    return [_MATRIX] * matrices + [(left,)] * (left > 0)


def _together(transport: GlooTransport) -> None:
    begin_s = when_all_arrived(transport) + _MARGIN_S
    time.sleep(max(0.0, begin_s - time.perf_counter()))
