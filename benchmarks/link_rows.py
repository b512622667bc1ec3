"""Rows of the link benchmark: what the ranks saw, beside what the schedule could reach."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.paper_shape import Method, RankResult, Shape, make_channel
from launch.plan.network import Network
from launch.plan.simulate import Message, StepModel, simulate
from launch.shaped.spec import PAYLOAD_SHARE
from pipeline.channel import BACKWARD, FORWARD

_CODEC_REPEATS = 7

Messages = tuple[Message, Message]
"""Activations and gradients of a method."""


@dataclass(frozen=True)
class Row:
    """One method on one network; rates in bit/s (None: unlimited), times in seconds.

    `step_s` is the median of `steps_s`, `first_visit_s` the step in which no sample was known.
    `bound_s` is the simulated step, with codec times measured in this run and links that carry TCP
    data at 0.956 of their rate (the rest is headers). `utilization` is the data through the busiest
    uplink over what it could carry in a step; `wire_bytes` is what all stages sent in one.
    `encode_s` and `decode_s` are for activations and gradients. `probe` is achieved over nominal
    rate of an empty link, `load` the load average over a minute before the run. `keep_window`
    is whether TCP was told not to start slowly after a pause.
    """

    form: str
    method: str
    schedule: str
    stages: int
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
    """What is known of a row besides the ranks' results."""

    stages: int
    delay_s: float
    probe: float | None
    load: float
    keep_window: bool = False


class _Mailbox:
    """A link without a network: what was sent is taken by the other end."""

    def __init__(self) -> None:
        self._message = torch.empty(0, dtype=torch.uint8)

    def begin_pass(self, number: int) -> None:
        """Nothing to wait for."""

    def expect(self, slot: int, nbytes: int) -> None:
        """Nothing to post."""

    def take(self, slot: int) -> Tensor:
        """What was sent last."""
        return self._message

    def send(self, slot: int, message: Tensor) -> None:
        """Keep the message."""
        self._message = message


def measure_messages(method: Method, shape: Shape) -> Messages:
    """Sizes of the messages of known samples, and the median seconds that their ends compute.

    torch's own pipelining sends tensors as they are.
    """
    if method.runner == "torch":
        message = Message(shape.boundary.numel() * method.dtype.itemsize)
        return message, message
    return _measure(method, shape, FORWARD), _measure(method, shape, BACKWARD)


def _measure(method: Method, shape: Shape, direction: int) -> Message:
    link, size, ids_B = _Mailbox(), shape.boundary, torch.zeros(1, dtype=torch.int64)
    sender, receiver = (
        make_channel(method, shape, link=link, cut=1, direction=direction) for _ in range(2)
    )
    encode_s, decode_s = [], []
    for _ in range(_CODEC_REPEATS + 1):
        x_BTD = torch.randn(size)
        begin_s = time.perf_counter()
        sender.send(0, x_BTD, ids_B)
        sent_s = time.perf_counter()
        receiver.receive(0, size, ids_B)
        decode_s.append(time.perf_counter() - sent_s)
        encode_s.append(sent_s - begin_s)
        nbytes = sender.take_traffic().nbytes
        sender.finish_step(keep=True)
        receiver.finish_step(keep=True)
    return Message(nbytes, statistics.median(encode_s[1:]), statistics.median(decode_s[1:]))


def bound_s(
    method: Method, shape: Shape, messages: Messages, rate_bps: float | None, at: Circumstances
) -> float:
    """Step time that the method's schedule could reach."""
    cuts = at.stages - 1
    model = StepModel(
        schedule=method.schedule,
        microbatches=shape.microbatches,
        forward_s=(shape.forward_s,) * at.stages,
        backward_s=(shape.backward_s,) * at.stages,
        activations=(messages[0],) * cuts,
        gradients=(messages[1],) * cuts,
        network=Network.uniform(at.stages, rate_bps, at.delay_s).payload(),
    )
    return simulate(model).step_s


def make_row(
    method: Method,
    ranks: Sequence[RankResult],
    shape: Shape,
    messages: Messages,
    at: Circumstances,
) -> Row:
    """Join what the ranks saw of a method at a rate."""
    rate_bps = ranks[0].rate_bps
    steps_s = tuple(max(moments) for moments in zip(*(r.steps_s for r in ranks), strict=True))
    step_s = statistics.median(steps_s)
    firsts = [rank.first_visit_s for rank in ranks if rank.first_visit_s is not None]
    busiest = max(rank.nbytes for rank in ranks)
    limit_s = bound_s(method, shape, messages, rate_bps, at)
    return Row(
        form="paper-shaped",
        method=method.name,
        schedule=method.schedule,
        stages=at.stages,
        rate_bps=rate_bps,
        delay_s=at.delay_s,
        tokens_per_s=shape.microbatches * shape.tokens / step_s,
        step_s=step_s,
        steps_s=steps_s,
        first_visit_s=max(firsts, default=None),
        bound_s=limit_s,
        bound_fraction=limit_s / step_s,
        wire_bytes=sum(rank.nbytes for rank in ranks),
        utilization=8 * busiest / (rate_bps * PAYLOAD_SHARE * step_s) if rate_bps else None,
        encode_s=(messages[0].encode_s, messages[1].encode_s),
        decode_s=(messages[0].decode_s, messages[1].decode_s),
        probe=at.probe,
        load=at.load,
        keep_window=at.keep_window,
    )


def with_references(rows: Sequence[Row]) -> list[Row]:
    """Fill in the speeds of the same method without a limit, and of ours with fp32 on this link."""
    speeds = {(row.stages, row.delay_s, row.rate_bps, row.method): row.tokens_per_s for row in rows}
    return [
        replace(
            row,
            unthrottled_tokens_per_s=speeds.get((row.stages, row.delay_s, None, row.method)),
            fp32_tokens_per_s=speeds.get((row.stages, row.delay_s, row.rate_bps, "fp32")),
        )
        for row in rows
    ]
