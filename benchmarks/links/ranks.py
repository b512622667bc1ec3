"""One rank's measurements of the link benchmark: every method at every rate, step by step."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.links.runners import Method, Runner, make_runner
from benchmarks.links.workloads import PaperShape
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.host.links import format_rate
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.net.ranks.group import meet, open_group
from thinpipe.launch.net.ranks.handshake import Lobby
from thinpipe.pipeline.comm.gloo import GlooTransport

_TIMEOUT_S = 120.0
_MARGIN_S = 0.05
_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


@dataclass(frozen=True)
class RankResult:
    """One rank's measurements of a method at one rate.

    `steps_s` are from the common start to this rank's end. `first_visit_s` is the step of first
    visits, None for methods without memory. `nbytes` is what the rank sent in one later step, our
    headers included.
    """

    method: str
    rate_bps: float | None
    steps_s: tuple[float, ...]
    first_visit_s: float | None
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What all ranks measure, in this order: every rate, every method, that many steps.

    `keep_window` disables TCP slow start after idle on the emulated hosts. With a `key`, messages
    go through the overlay.
    """

    workload: PaperShape
    methods: Sequence[Method]
    rates: Sequence[float | None]
    steps: int
    delay_s: float = 0.0
    keep_window: bool = False
    key: Path | None = None


SetRate = Callable[[float | None], None]


def set_rate(network: ShapedNetwork, rate_bps: float | None) -> None:
    """Give every link of an emulated network this rate; None: no limit."""
    network.set_rates("none" if rate_bps is None else f"{rate_bps:.0f}bit")


@contextlib.contextmanager
def default_group(timeout_s: float, key: Path | None = None) -> Iterator[None]:
    """Inside, this process is a rank of the default group; with a key, through the overlay."""
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    config = NetworkConfig(key_file=str(key) if key else None, trusted=key is None)
    lobby = Lobby(world, timeout_s, print_error)
    store, network = meet(config, rank, world, lobby, wait_s=timeout_s)
    open_group(store, rank, world, wait_s=timeout_s, joining=False)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if network is not None:
            network.close()


def when_all_arrived(transport: GlooTransport) -> float:
    """When the last rank called it; the hosts share this machine's clock."""
    now = torch.tensor([time.perf_counter()], dtype=torch.float64)
    return float(transport.share(now, "world").max())


def keep_windows() -> None:
    """TCP keeps its windows while links are idle; of this host, not of the machine."""
    _SLOW_START.write_text("0", encoding="utf-8")


def run_host(host: int, plan: Plan, set_rate: SetRate = lambda _: None) -> list[RankResult]:
    """Measure as one host of an emulated network."""
    if plan.keep_window:
        keep_windows()
    with default_group(_TIMEOUT_S, plan.key):
        return run_rank(plan, set_rate)


def run_rank(plan: Plan, set_rate: SetRate) -> list[RankResult]:
    """Measure as one rank of the default group; rank 0 calls `set_rate` and prints steps.

    Before the first rate every method runs steps that are discarded.
    """
    transport = GlooTransport(dist.get_world_size(), 1, timeout_s=_TIMEOUT_S)
    bench = _RankBench(transport, plan)
    runners = {method: make_runner(method, plan.workload, transport) for method in plan.methods}
    for method, runner in runners.items():
        for _ in range(method.warm_steps):
            bench.step(runner, bench.ids(0))
    results = []
    for number, rate_bps in enumerate(plan.rates, start=1):
        if transport.mesh.rank == 0:
            set_rate(rate_bps)
        ids_S = bench.ids(number)
        results += [bench.measure(method, runners[method], ids_S, rate_bps) for method in runners]
    when_all_arrived(transport)
    return results


class _RankBench:
    def __init__(self, transport: GlooTransport, plan: Plan) -> None:
        self._transport, self._plan = transport, plan
        self._margin_s = _MARGIN_S + 2 * plan.delay_s
        self._number = 0

    def ids(self, number: int) -> Tensor:
        """Samples of their own for each number."""
        samples = self._plan.workload.microbatches * self._plan.workload.boundary[0]
        return torch.arange(samples) + number * samples

    def measure(
        self, method: Method, runner: Runner, ids_S: Tensor, rate_bps: float | None
    ) -> RankResult:
        first_visit_s = self.step(runner, ids_S) if method.remembers else None
        runner.take_sent()
        steps_s = tuple(self.step(runner, ids_S) for _ in range(self._plan.steps))
        nbytes = runner.take_sent() // self._plan.steps
        if self._transport.mesh.rank == 0:
            rounded = [round(step_s, 3) for step_s in steps_s]
            print(f"{method.name}, {format_rate(rate_bps)}: {rounded} s", flush=True)
        return RankResult(method.name, rate_bps, steps_s, first_visit_s, nbytes)

    def step(self, runner: Runner, ids_S: Tensor) -> float:
        """Seconds from the common start to the end of this rank."""
        self._number += 1
        begin_s = when_all_arrived(self._transport) + self._margin_s
        time.sleep(max(0.0, begin_s - time.perf_counter()))
        runner.step(self._number, ids_S)
        return time.perf_counter() - begin_s
