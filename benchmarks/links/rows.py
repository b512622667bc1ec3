"""Rows of the link benchmark: measured steps beside the best that the schedule can reach."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.links.ranks import RankResult
from benchmarks.links.runners import Method
from benchmarks.links.workloads import PaperShape
from thinpipe.launch.cuts.message_cost import Message, measure_message
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.events import simulate
from thinpipe.launch.plan.placement.workload import Workload as Step
from thinpipe.pipeline.wire.told import BACKWARD, FORWARD

Messages = tuple[Message, Message]
"""Activations and gradients of a method."""


@dataclass(frozen=True)
class Row:
    """One method on one network; rates in bit/s (None: unlimited), times in seconds.

    `rate_bps` and `delay_s` are those of the emulated links. `depth` is that of Deep1F1B; other
    schedules have none.
    `step_s` is the median of `steps_s`, `first_visit_s` the step of first visits.
    `bound_s` is the simulated step, with codec times measured in this run and links that carry TCP
    data at 0.956 of their rate (the rest is headers). `utilization` is the data through the busiest
    uplink over what it could carry in a step; `wire_bytes` is what all stages sent in one.
    `encode_s` and `decode_s` are for activations and gradients. `probe` is achieved over nominal
    rate of an idle link, `load` the load average over a minute before the run. `keep_window`
    is whether TCP slow start after idle was disabled.
    """

    method: str
    schedule: str
    depth: int
    stages: int
    microbatches: int
    rate_bps: float | None
    delay_s: float
    tokens_per_s: float
    step_s: float
    steps_s: tuple[float, ...]
    first_visit_s: float | None
    bound_s: float
    bound_fraction: float
    wire_bytes: int
    utilization: float | None
    encode_s: tuple[float, float]
    decode_s: tuple[float, float]
    probe: float | None
    load: float
    keep_window: bool
    unthrottled_tokens_per_s: float | None = None
    fp32_tokens_per_s: float | None = None


@dataclass(frozen=True)
class Circumstances:
    """Conditions of a row besides the ranks' results."""

    stages: int
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
    """Combine the ranks' results of a method at a rate."""
    rate_bps = ranks[0].rate_bps
    steps_s = tuple(max(times_s) for times_s in zip(*(r.steps_s for r in ranks), strict=True))
    step_s = statistics.median(steps_s)
    firsts = [rank.first_visit_s for rank in ranks if rank.first_visit_s is not None]
    busiest = max(rank.nbytes for rank in ranks)
    limit_s = bound_s(
        method, workload, messages, stages=len(ranks), rate_bps=rate_bps, delay_s=at.delay_s
    )
    samples, tokens, _ = workload.boundary
    return Row(
        method=method.name,
        schedule=method.schedule,
        depth=method.depth,
        microbatches=workload.microbatches,
        rate_bps=rate_bps,
        tokens_per_s=workload.microbatches * samples * tokens / step_s,
        step_s=step_s,
        steps_s=steps_s,
        first_visit_s=max(firsts, default=None),
        bound_s=limit_s,
        bound_fraction=limit_s / step_s,
        wire_bytes=sum(rank.nbytes for rank in ranks),
        utilization=8 * busiest / (rate_bps * PAYLOAD_SHARE * step_s) if rate_bps else None,
        encode_s=(messages[0].encode_s, messages[1].encode_s),
        decode_s=(messages[0].decode_s, messages[1].decode_s),
        **asdict(at),
    )


def with_references(rows: Sequence[Row]) -> list[Row]:
    """Add the speeds of the same method without a limit, and of ours with fp32 on this link."""

    def conditions(row: Row) -> tuple[object, ...]:
        return (row.stages, row.microbatches, row.depth, row.delay_s, row.keep_window)

    speeds = {(*conditions(row), row.rate_bps, row.method): row.tokens_per_s for row in rows}
    return [
        replace(
            row,
            unthrottled_tokens_per_s=speeds.get((*conditions(row), None, row.method)),
            fp32_tokens_per_s=speeds.get((*conditions(row), row.rate_bps, "fp32")),
        )
        for row in rows
    ]
