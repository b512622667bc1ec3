"""`python -m benchmarks.links`: compares methods by their training step over slow links.

On an emulated network (`thinpipe shaped`), with slept compute (`benchmarks.links.workloads`).
Methods are our stage with several boundaries, and torch's own pipelining. Every row has the
measured step, the best step of the schedule on that link (`launch/plan/placement/events.py`), and
the measured rate of an idle link.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Records, Row, command_line, parse_options, summary
from benchmarks.links.ranks import Plan, RankResult, run_host, set_rate
from benchmarks.links.rows import (
    Circumstances,
    Messages,
    make_row,
    measure_messages,
    with_references,
)
from benchmarks.links.runners import METHODS, Method
from benchmarks.links.workloads import PaperShape
from thinpipe.launch.host.allocator import keep_freed_memory
from thinpipe.launch.host.links import parse_rate, parse_time
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.probe import probe_link
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys
from thinpipe.pipeline.orders import DEPTH

_LIMIT_S = 3600.0
_FULL_STAGES = [2, 4, 8]
_FULL_RATES = ["10mbit", "100mbit", "300mbit", "500mbit", "1gbit"]
_FULL_DELAYS = ["0ms", "10ms", "50ms"]
_DEFAULT = (
    *("fp32", "bf16", "direct fw3/bw6", "aqsgd fw3/bw6", "aqsgd fw2/bw4"),
    *("torch GPipe fp32", "torch GPipe bf16", "torch 1F1B bf16"),
)
_COLUMNS = {
    "step s": ".2f",
    "bound s": ".2f",
    "bound/step": ".3f",
    "tokens/s": ",.0f",
    "x fp32": ".2f",
    "of free": ".3f",
    "link use": ".2f",
    "first visit s": ".2f",
    "wire MB": ".1f",
    "probe": ".3f",
}


def measure_network(plan: Plan, stages: int, messages: dict[Method, Messages]) -> list[Row]:
    """Measure everything in the plan on a network of that many hosts."""
    load = os.getloadavg()[0]
    spec = NetworkSpec.of(stages, delay=f"{plan.delay_s}s")
    with ShapedNetwork(spec) as network:
        probes = {}
        for rate_bps in plan.rates:
            set_rate(network, rate_bps)
            probes[rate_bps] = probe_link(network, 0, 1).ratio
        set_rate(network, None)
        job = partial(run_host, plan=plan, set_rate=partial(set_rate, network))
        by_rank: list[list[RankResult]] = network.run(job, timeout_s=_LIMIT_S)
    by_name = {method.name: method for method in plan.methods}
    rows = []
    for ranks in zip(*by_rank, strict=True):
        method, rate_bps = by_name[ranks[0].method], ranks[0].rate_bps
        at = Circumstances(plan.delay_s, probes[rate_bps], load, plan.keep_window)
        rows.append(make_row(method, ranks, plan.workload, messages[method], at))
    return rows


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    command = command_line("benchmarks.links", __doc__)
    command.add_argument("--stages", type=int, nargs="+", default=[4])
    command.add_argument("--rates", nargs="+", default=["100mbit", "500mbit"])
    command.add_argument("--delays", nargs="+", default=["0ms"], help="one way, such as 50ms")
    names = [method.name for method in METHODS]
    command.add_argument("--methods", nargs="+", choices=names, default=_DEFAULT, metavar="NAME")
    command.add_argument(
        "--microbatches", type=int, default=8, help="of a step (default 8; the paper's batch: 32)"
    )
    command.add_argument(
        "--depth", type=int, default=DEPTH, help=f"of Deep1F1B (default {DEPTH}, as in training)"
    )
    command.add_argument("--steps", type=int, default=3, help="measured steps of each row")
    command.add_argument(
        "--keep-window",
        action="store_true",
        help="set net.ipv4.tcp_slow_start_after_idle = 0 on the hosts; matters with a delay",
    )
    command.add_argument(
        "--open", action="store_true", help="without the overlay: plain connections between hosts"
    )
    full = {"stages": _FULL_STAGES, "rates": _FULL_RATES, "delays": _FULL_DELAYS, "methods": names}
    options = parse_options(command, arguments, "full", full)
    if options.depth < 0:
        command.error(f"--depth = {options.depth}: use 0 (which is 1F1B) or more")
    return options


def _plan(arguments: argparse.Namespace) -> Plan:
    methods = [
        replace(method, depth=arguments.depth)
        for method in METHODS
        if method.name in arguments.methods
    ]
    workload = PaperShape(microbatches=arguments.microbatches)
    rates = [None, *map(parse_rate, arguments.rates)]
    return Plan(workload, methods, rates, arguments.steps, keep_window=arguments.keep_window)


def main() -> None:
    """Measure, print the table, write the requested files."""
    arguments = _arguments()
    torch.set_num_threads(1)  # the ranks are forked from here, and share the cores
    keep_freed_memory()  # as every rank of a run does
    plan, folder = _plan(arguments), tempfile.TemporaryDirectory()
    if not arguments.open:
        key = Path(folder.name) / "run.key"
        keys.new(key)
        plan = replace(plan, key=key)
    messages = {method: measure_messages(method, plan.workload) for method in plan.methods}
    records, rows = Records(arguments.json), list[Row]()
    for delay in arguments.delays:
        delayed = replace(plan, delay_s=parse_time(delay))
        for stages in arguments.stages:
            for row in with_references(measure_network(delayed, stages, messages)):
                rows.append(row)
                records.add({}, row)
    print(
        f"Deep1F1B at depth {arguments.depth}; {plan.workload.microbatches} microbatches per step"
    )
    print(summary(rows, _COLUMNS))


if __name__ == "__main__":
    main()
