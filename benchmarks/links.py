"""`python -m benchmarks.links`: one training step over slow links, method beside method.

The paper-shaped form (`benchmarks.paper_shape`) on an emulated network (`thinpipe shaped`): our
stage with several boundaries, and torch's own pipelining as it comes. Every row has the measured
step, the step that the schedule could reach on that link (`launch.plan.simulate`), and what an
empty link achieved in the same run.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import environment, format_table
from benchmarks.link_rows import (
    Circumstances,
    Messages,
    Row,
    make_row,
    measure_messages,
    with_references,
)
from benchmarks.links_figure import draw
from benchmarks.paper_shape import METHODS, Method, Plan, RankResult, Shape, run_host
from launch.shaped.network import ShapedNetwork
from launch.shaped.probe import probe_link
from launch.shaped.spec import NetworkSpec, format_rate, parse_rate, parse_time

_LIMIT_S = 3600.0
_FULL_STAGES, _FULL_RATES = [2, 4, 8], ["100mbit", "300mbit", "500mbit", "1gbit"]
_HEADS = (
    *("method", "stages", "rate", "delay ms", "step s", "bound s", "bound/step", "tokens/s"),
    *("x fp32", "of free", "link use", "first visit s", "wire MB", "probe"),
)


def measure_network(plan: Plan, stages: int, messages: dict[Method, Messages]) -> list[Row]:
    """Everything in the plan, on a network of that many hosts."""
    load = os.getloadavg()[0]
    spec = NetworkSpec.of(stages, delay=f"{plan.delay_s}s")
    with ShapedNetwork(spec) as network:

        def set_rate(rate_bps: float | None) -> None:
            network.set_rates("none" if rate_bps is None else f"{rate_bps:.0f}bit")

        probes = {}
        for rate_bps in plan.rates:
            set_rate(rate_bps)
            probes[rate_bps] = probe_link(network, 0, 1).ratio
        set_rate(None)
        job = partial(run_host, plan=plan, set_rate=set_rate)
        by_rank: list[list[RankResult]] = network.run(job, timeout_s=_LIMIT_S)
    by_name = {method.name: method for method in plan.methods}
    rows = []
    for ranks in zip(*by_rank, strict=True):
        method = by_name[ranks[0].method]
        probe = probes[ranks[0].rate_bps]
        at = Circumstances(stages, plan.delay_s, probe, load, keep_window=plan.keep_window)
        rows.append(make_row(method, ranks, plan.shape, messages[method], at))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return format_table(_HEADS, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.method,
        str(row.stages),
        format_rate(row.rate_bps),
        f"{row.delay_s * 1e3:g}",
        f"{row.step_s:.2f}",
        f"{row.bound_s:.2f}",
        f"{row.bound_fraction:.3f}",
        f"{row.tokens_per_s:,.0f}",
        _ratio(row.tokens_per_s, row.fp32_tokens_per_s, 2),
        _ratio(row.tokens_per_s, row.unthrottled_tokens_per_s, 3),
        _number(row.utilization, 2),
        _number(row.first_visit_s, 2),
        f"{row.wire_bytes / 1e6:.1f}",
        _number(row.probe, 3),
    )


def _ratio(value: float, reference: float | None, digits: int) -> str:
    return _number(value / reference if reference else None, digits)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _write(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object per line."""
    facts = environment()
    lines = [json.dumps(asdict(row) | {"environment": facts}) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.links", description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "500mbit", "1gbit"])
    parser.add_argument("--delays", nargs="+", default=["0ms"], help="one way, such as 50ms")
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each row")
    parser.add_argument("--full", action="store_true", help="2, 4 and 8 stages, four rates")
    parser.add_argument(
        "--keep-window",
        action="store_true",
        help="hosts with net.ipv4.tcp_slow_start_after_idle = 0; matters where there is a delay",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.full:
        arguments.stages, arguments.rates = _FULL_STAGES, _FULL_RATES
    return arguments


def main() -> None:
    """Measure, print the table, write what was asked for."""
    arguments = _arguments()
    torch.set_num_threads(1)  # the ranks are forked from here, and share the cores
    rates = [None, *(parse_rate(rate) for rate in arguments.rates)]
    methods = [method for method in METHODS if method.name in arguments.methods]
    plan = Plan(Shape(), methods, rates, arguments.steps, keep_window=arguments.keep_window)
    messages = {method: measure_messages(method, plan.shape) for method in methods}
    rows: list[Row] = []
    for delay in arguments.delays:
        delayed = replace(plan, delay_s=parse_time(delay))
        for stages in arguments.stages:
            rows += measure_network(delayed, stages, messages)
            if arguments.json is not None:
                _write(arguments.json, with_references(rows))
    rows = with_references(rows)
    print(table(rows))
    if arguments.figure is not None:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
