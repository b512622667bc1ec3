"""`python -m benchmarks.replicas`: step times of replicas over slow links, method beside method.

Measurements on emulated networks (`thinpipe shaped`):

* `replicas`: two replicas, throttled like CocktailSGD's published setting: at "500 Mbps" an fp16
  all-reduce takes 22 times as long as the computation, whatever the size of the model. Rates are
  scaled by that; compute is slept.
* `overlapped`: the same for all methods whose exchange runs beside the computation and is small
  enough; means over many steps, as some exchange every 30 steps only.
* `uplinks`: 8 replicas that share their uplinks of 10 Mbit/s with nobody; also an exchange that
  every step waits for.
* `end-to-end`: two replicas of a two-stage pipeline at real rates, compressed at the cut and
  between replicas, against fp32 at both.
* `priority`: round trips of small messages of the pipeline beside a bulk exchange.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Records, command_line, format_table
from benchmarks.links.ranks import set_rate
from benchmarks.links.runners import METHODS as CUTS
from benchmarks.links.workloads import PaperShape
from benchmarks.replicas.rank import Method, Plan, RankResult, ping_host, run_host
from thinpipe.launch.host.links import PAYLOAD_SHARE, format_rate
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys

_LIMIT_S = 3600.0
_FP16_TO_COMPUTE, _AT_BPS = 22.0, 500e6
_COCKTAIL = {"subset": 0.1, "topk": 0.2, "bits": 4}
_BY_CUT = {cuts.name: cuts for cuts in CUTS}
_PING_NBYTES, _PING_RATE = 8_000_000, 100e6
_UPLINK_BPS = 10e6

REPLICA_METHODS = (
    Method("none", "none", {}),
    Method("all-reduce fp32", "allreduce", {}),
    Method("all-reduce bf16", "allreduce", {"format": "bf16"}),
    Method("cocktail, no delay", "cocktail", {**_COCKTAIL, "delayed": False}),
    Method("cocktail", "cocktail", _COCKTAIL),
)
_RARE = {"interval": 30, "overlap": 5}
OVERLAPPED_METHODS = (
    Method("none", "none", {}),
    Method("cocktail", "cocktail", _COCKTAIL),
    Method("ef_updates", "ef_updates", {}),
    Method("ef_gradients", "ef_gradients", {"delayed": True}),
    Method("DeMo", "demo", {}),
    Method("streaming DiLoCo, 4 bits", "diloco", {**_RARE, "bits": 4, "mix": 0.5}),
    Method("SparseLoCo", "sparse_loco", _RARE),
)
UPLINK_METHODS = (*OVERLAPPED_METHODS, Method("ef_gradients, no delay", "ef_gradients", {}))
END_TO_END_METHODS = (
    Method("fp32 cut, fp32 all-reduce", "allreduce", {}, _BY_CUT["fp32"]),
    Method("bf16 cut, bf16 all-reduce", "allreduce", {"format": "bf16"}, _BY_CUT["bf16"]),
    Method("aqsgd fw3/bw6, fp32 all-reduce", "allreduce", {}, _BY_CUT["aqsgd fw3/bw6"]),
    Method("aqsgd fw3/bw6, cocktail", "cocktail", _COCKTAIL, _BY_CUT["aqsgd fw3/bw6"]),
    Method("aqsgd fw3/bw6, none", "none", {}, _BY_CUT["aqsgd fw3/bw6"]),
)

_FP32 = ("all-reduce fp32", "fp32 cut, fp32 all-reduce")


@dataclass(frozen=True)
class Row:
    """A method at a rate: the typical one of the slowest replica's steps.

    `stands_for_bps` is the rate of the published setting that `rate_bps` is scaled from.
    """

    method: str
    rate_bps: float | None
    stands_for_bps: float | None
    step_s: float
    steps_s: tuple[float, ...]
    sync_nbytes: int
    cut_nbytes: int
    wire_s: float
    compute_s: float


def scaled_rate(plan: Plan, stands_for_bps: float) -> float:
    """The rate at which this plan's fp16 all-reduce is to its compute as published."""
    fp16_bits = 8 * 2 * plan.parameters  # a ring of two replicas sends every value once
    return fp16_bits / (_FP16_TO_COMPUTE * plan.compute_s) * stands_for_bps / _AT_BPS


def measure(plan: Plan) -> list[Row]:
    """Run a plan on a network of its own."""
    with ShapedNetwork(NetworkSpec.of(plan.replicas * plan.pipeline_ranks)) as network:
        job = partial(run_host, plan=plan, set_rate=partial(set_rate, network))
        by_rank: list[list[RankResult]] = network.run(job, timeout_s=_LIMIT_S)
    return [make_row(plan, ranks) for ranks in zip(*by_rank, strict=True)]


def make_row(plan: Plan, ranks: Sequence[RankResult]) -> Row:
    """Join what the ranks saw of a method at a rate: medians, or means over a whole interval."""
    first = ranks[0]
    steps_s = tuple(max(seconds) for seconds in zip(*(r.steps_s for r in ranks), strict=True))
    nbytes = max(rank.sync_nbytes for rank in ranks)
    rate_bps = first.rate_bps
    scale, scaled = scaled_rate(plan, 1.0), plan.shape is None and plan.replicas == 2
    return Row(
        method=first.method,
        rate_bps=rate_bps,
        stands_for_bps=rate_bps / scale if rate_bps and scaled else rate_bps,
        step_s=_typical(steps_s),
        steps_s=steps_s,
        sync_nbytes=nbytes,
        cut_nbytes=sum(rank.cut_nbytes for rank in ranks),
        wire_s=8 * nbytes / (rate_bps * PAYLOAD_SHARE) if rate_bps else 0.0,
        compute_s=plan.compute_s,
    )


def _typical(steps_s: Sequence[float]) -> float:
    return (statistics.mean if len(steps_s) >= _RARE["interval"] else statistics.median)(steps_s)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; `of free` compares with the same method without a limit."""
    heads = ("method", "rate", "stands for", "step s", "wire s", "x fp32", "of free", "MB sync")
    free = {row.method: row.step_s for row in rows if row.rate_bps is None}
    fp32 = {row.rate_bps: row.step_s for row in rows if row.method in _FP32}
    cells = []
    for row in rows:
        base = fp32.get(row.rate_bps)
        cells.append(
            (
                row.method,
                format_rate(row.rate_bps),
                format_rate(row.stands_for_bps),
                f"{row.step_s:.3f}",
                f"{row.wire_s:.3f}",
                f"{base / row.step_s:.2f}" if base else "-",
                f"{row.step_s / free[row.method]:.3f}" if row.method in free else "-",
                f"{row.sync_nbytes / 1e6:.3f}",
            )
        )
    return format_table(heads, cells)


def priority_table(pings: int) -> tuple[str, dict[str, list[float]]]:
    """Round trips alone and beside an exchange that fills 100 Mbit/s, with the overlay or not."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "run.key"
        keys.new(key)
        for how, path in (("overlay", key), ("open", None)):
            with ShapedNetwork(NetworkSpec.of(2, f"{_PING_RATE:.0f}bit")) as network:
                job = partial(ping_host, nbytes=_PING_NBYTES, pings=pings, key=path)
                first, _ = network.run(job, timeout_s=_LIMIT_S)
            found |= {f"{how}, {what}": times for what, times in first.items()}
    rows = [
        (what, f"{1e3 * statistics.median(times):.1f}", f"{1e3 * max(times):.1f}")
        for what, times in found.items()
    ]
    return format_table(("small messages", "round trip ms, median", "longest ms"), rows), found


def _plans(options: argparse.Namespace) -> dict[str, Plan]:
    alone = Plan(REPLICA_METHODS, [], options.steps, options.parameters, options.compute)
    shape = PaperShape(microbatches=options.microbatches)
    seconds = shape.microbatches * (shape.forward_s + shape.backward_s)
    rates = [None, *(scaled_rate(alone, rate * 1e6) for rate in options.mbps)]
    joint_rates = [None, *(rate * 1e6 for rate in options.mbps)]
    many = replace(alone, methods=OVERLAPPED_METHODS, rates=rates, steps=2 * _RARE["interval"])
    return {
        "replicas": replace(alone, rates=rates),
        "overlapped": many,
        "uplinks": replace(many, methods=UPLINK_METHODS, rates=[None, _UPLINK_BPS], replicas=8),
        "end-to-end": Plan(
            END_TO_END_METHODS, joint_rates, options.steps, options.stage_parameters, seconds, shape
        ),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for and print the tables."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    records = Records(options.json)
    for name, plan in _plans(options).items():
        if name in options.parts:
            rows = measure(plan)
            for row in rows:
                records.add({"part": name}, asdict(row))
            print(f"\n{name}\n\n{table(rows)}", flush=True)
    if "priority" in options.parts:
        text, found = priority_table(options.pings)
        records.add({"part": "priority", "rate_bps": _PING_RATE}, found)
        print(f"\npriority\n\n{text}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.replicas", __doc__)
    parts = ("replicas", "overlapped", "uplinks", "end-to-end", "priority")
    command.add_argument("--parts", nargs="+", choices=parts, default=parts)
    command.add_argument("--mbps", type=float, nargs="+", default=[500.0, 100.0])
    command.add_argument("--steps", type=int, default=3)
    command.add_argument("--parameters", type=int, default=3_200_000, help="of a replica")
    command.add_argument("--compute", type=float, default=0.26, help="seconds of a step")
    command.add_argument("--stage-parameters", type=int, default=16_000_000, help="end to end")
    command.add_argument("--microbatches", type=int, default=8, help="end to end, per replica")
    command.add_argument("--pings", type=int, default=20)
    return command.parse_args(arguments)
