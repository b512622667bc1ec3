"""Rows of the link benchmark: measured steps against the best that the schedule can reach."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import Row
from benchmarks.links.ranks import RankResult
from benchmarks.links.runners import Method
from benchmarks.links.workloads import PaperShape
from thinpipe.launch.cuts.message_cost import Message, measure_message
from thinpipe.launch.host.links import PAYLOAD_SHARE, format_rate
from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.events import simulate
from thinpipe.launch.plan.placement.workload import Workload as Step
from thinpipe.pipeline.wire.told import BACKWARD, FORWARD

Messages = tuple[Message, Message]
"""Activations and gradients of a method."""


@dataclass(frozen=True)
class Circumstances:
    """Conditions of a row besides the ranks' results.

    `load` is the load average over a minute before the run, `keep_window` whether TCP's slow start
    after idle was disabled.
    """

    delay_s: float
    probe: float | None
    load: float
    keep_window: bool = False


def measure_messages(method: Method, workload: PaperShape) -> Messages:
    """Sizes of the messages of known samples, and the seconds to encode and decode them.

    torch's own pipelining sends tensors as they are.
    """
    if method.runtime == "torch":
        message = Message(workload.boundary.numel() * method.dtype.itemsize)
        return message, message
    return (
        measure_message(method.forward, workload.boundary, FORWARD),
        measure_message(method.backward, workload.boundary, BACKWARD),
    )


def bound_s(
    method: Method,
    workload: PaperShape,
    messages: Messages,
    *,
    stages: int,
    rate_bps: float | None,
    delay_s: float,
) -> float:
    """The best step time of the method's schedule."""
    cuts = stages - 1
    step = Step(
        replicas=1,
        schedule=method.schedule,
        microbatches=workload.microbatches,
        forward_s=(workload.forward_s,) * stages,
        backward_s=(workload.backward_s,) * stages,
        activations=(messages[0],) * cuts,
        gradients=(messages[1],) * cuts,
        depth=method.depth,
    )
    return simulate(step, Network.uniform(stages, rate_bps, delay_s)).step_s


def make_row(
    method: Method,
    ranks: Sequence[RankResult],
    workload: PaperShape,
    messages: Messages,
    at: Circumstances,
) -> Row:
    """Combine the ranks' results of a method at a rate; medians of steps.

    `bound s` is the simulated step, with codec times measured in this run and links that carry TCP
    data at 0.956 of their rate (the rest is headers). `link use` is the data through the busiest
    uplink over what it could carry in a step; `wire MB` is what all stages sent in one. `probe` is
    achieved over nominal rate of an idle link.
    """
    rate_bps = ranks[0].rate_bps
    steps_s = tuple(max(times_s) for times_s in zip(*(r.steps_s for r in ranks), strict=True))
    step_s = statistics.median(steps_s)
    firsts = [rank.first_visit_s for rank in ranks if rank.first_visit_s is not None]
    busiest = max(rank.nbytes for rank in ranks)
    limit_s = bound_s(
        method, workload, messages, stages=len(ranks), rate_bps=rate_bps, delay_s=at.delay_s
    )
    samples, tokens, _ = workload.boundary
    conditions = {"stages": len(ranks), "delay ms": 1e3 * at.delay_s, "rate": format_rate(rate_bps)}
    numbers = {
        "step s": step_s,
        "bound s": limit_s,
        "bound/step": limit_s / step_s,
        "tokens/s": workload.microbatches * samples * tokens / step_s,
        "link use": 8 * busiest / (rate_bps * PAYLOAD_SHARE * step_s) if rate_bps else None,
        "first visit s": max(firsts, default=None),
        "wire MB": sum(rank.nbytes for rank in ranks) / 1e6,
        "probe": at.probe,
    }
    detail = {
        "schedule": method.schedule,
        "depth": method.depth,
        "rate_bps": rate_bps,
        "microbatches": workload.microbatches,
        "steps_s": steps_s,
        "encode_s": (messages[0].encode_s, messages[1].encode_s),
        "decode_s": (messages[0].decode_s, messages[1].decode_s),
        "load": at.load,
        "keep_window": at.keep_window,
    }
    return Row(method.name, numbers, conditions, detail=detail)


def with_references(rows: Sequence[Row]) -> list[Row]:
    """Add the speed over that of ours with fp32 on this link, and of the same without a limit."""
    speeds = {(row.method, *row.conditions.values()): row.numbers["tokens/s"] for row in rows}

    def compared(row: Row) -> Row:
        stages, delay_ms, rate = row.conditions.values()
        speed = row.numbers["tokens/s"]
        others = {
            "x fp32": speeds.get(("fp32", stages, delay_ms, rate)),
            "of free": speeds.get((row.method, stages, delay_ms, format_rate(None))),
        }
        ratios = {name: speed / it if speed and it else None for name, it in others.items()}
        return replace(row, numbers={**row.numbers, **ratios})

    return [compared(row) for row in rows]
