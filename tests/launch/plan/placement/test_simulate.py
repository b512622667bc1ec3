"""Recorded steps: small ones solved by hand, and what holds in all of them."""

import random
from dataclasses import replace
from typing import get_args

import pytest

from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.events import SimulatedStep, simulate
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.orders import ONE_STAGE_PER_RANK
from thinpipe.pipeline.wire.told import DIRECTIONS, ScheduleName

FREE = Message(0)
ONE_SECOND = Message(125_000)  # at 1 Mbit/s
MBIT = 1e6 / PAYLOAD_SHARE  # on the wire, so that a megabit of payload goes through


def pipeline(message: Message = FREE, *, stages: int = 2, **options: object) -> Workload:
    work = Workload(
        replicas=1,
        schedule="GPipe",
        microbatches=2,
        forward_s=(1.0,) * stages,
        backward_s=(1.0,) * stages,
        activations=(message,) * (stages - 1),
        gradients=(message,) * (stages - 1),
    )
    return replace(work, **options)


def of_no_time(message: Message, stages: int, **options: object) -> Workload:
    none_s = (0.0,) * stages
    return pipeline(message, stages=stages, forward_s=none_s, backward_s=none_s, **options)


def work(step: SimulatedStep, rank: int) -> list[tuple[str, float, float]]:
    return [
        (f"{event.kind}{event.microbatch}", event.start_s, event.end_s)
        for event in step.events
        if event.rank == rank and event.computes
    ]


def test_without_a_network_only_the_bubble_costs_time() -> None:
    step = simulate(pipeline(backward_s=(2.0, 2.0)))
    assert work(step, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 7, 9)]
    assert work(step, 1) == [("F0", 1, 2), ("F1", 2, 3), ("B0", 3, 5), ("B1", 5, 7)]
    assert step.step_s == 9


def test_a_slow_link_carries_one_message_after_the_other() -> None:
    model = pipeline(Message(500_000), microbatches=3)  # 4 s each
    step = simulate(model, Network.uniform(2, MBIT))
    times = [(t.direction, t.microbatch, t.start_s, t.end_s) for t in step.transfers]
    assert times == [
        ("forward", 0, 1, 5),
        ("forward", 1, 5, 9),
        ("forward", 2, 9, 13),
        ("backward", 0, 15, 19),
        ("backward", 1, 19, 23),
        ("backward", 2, 23, 27),
    ]
    assert step.step_s == 28


def test_a_delay_is_paid_once_when_enough_microbatches_are_in_flight() -> None:
    model, far = pipeline(microbatches=3), Network.uniform(2, None, 10.0)
    assert simulate(replace(model, schedule="1F1B"), far).step_s == 48  # the third waits
    assert simulate(replace(model, schedule="Deep1F1B"), far).step_s == 28


def test_codecs_delay_messages_but_not_compute() -> None:
    step = simulate(pipeline(Message(0, encode_s=0.5, decode_s=0.25)))
    first, second = [("F0", 0, 1), ("F1", 1, 2)], [("F0", 1.75, 2.75), ("F1", 2.75, 3.75)]
    assert work(step, 0) == [*first, ("B0", 5.5, 6.5), ("B1", 6.5, 7.5)]
    assert work(step, 1) == [*second, ("B0", 3.75, 4.75), ("B1", 4.75, 5.75)]


def test_the_codec_of_a_direction_handles_one_message_at_a_time() -> None:
    step = simulate(pipeline(Message(0, encode_s=3.0, decode_s=4.0)))
    codec = [
        (f"{event.kind}{event.microbatch}", event.rank, event.start_s, event.end_s)
        for event in step.events
        if event.kind in ("encode", "decode") and event.start_s < 12
    ]
    assert sorted(codec, key=lambda event: event[2]) == [
        ("encode0", 0, 1, 4),
        ("encode1", 0, 4, 7),
        ("decode0", 1, 4, 8),
        ("decode1", 1, 8, 12),
    ]
    assert work(step, 1) == [("F0", 8, 9), ("F1", 12, 13), ("B0", 13, 14), ("B1", 14, 15)]
    assert work(step, 0)[2:] == [("B0", 21, 22), ("B1", 25, 26)]


def test_codecs_of_the_two_directions_run_concurrently() -> None:
    model = pipeline(Message(0, encode_s=2.0, decode_s=2.0), schedule="1F1B")
    starts_s = {
        f"{event.kind}{event.microbatch}": event.start_s
        for event in simulate(model).events
        if event.rank == 1 and event.kind in ("encode", "decode")
    }
    assert starts_s == {"decode0": 3, "decode1": 5, "encode0": 7, "encode1": 9}


def test_both_directions_of_a_cut_are_used_at_once() -> None:
    step = simulate(of_no_time(ONE_SECOND, 2, schedule="1F1B"), Network.uniform(2, MBIT))
    spans = {(t.direction, t.microbatch): (t.start_s, t.end_s) for t in step.transfers}
    assert spans["backward", 0] == spans["forward", 1] == (1, 2)


def test_a_stage_in_the_middle_sends_both_ways_through_one_uplink() -> None:
    model = of_no_time(ONE_SECOND, 3, schedule="1F1B", microbatches=8)
    assert simulate(model, Network.uniform(3, MBIT)).step_s >= 16  # 8 activations and 8 gradients


def test_a_slow_link_delays_its_own_messages_and_no_others() -> None:
    rates = ((None, 2 * MBIT, None), (2 * MBIT, None, MBIT), (None, 2 * MBIT, None))
    model = of_no_time(ONE_SECOND, 3, gradients=(FREE,) * 2)
    step = simulate(model, Network(rates, ((0.0,) * 3,) * 3))
    spans = {(t.cut, t.microbatch): (t.start_s, t.end_s) for t in step.transfers[:4]}
    assert spans == {(0, 0): (0, 0.5), (0, 1): (0.5, 1), (1, 0): (0.5, 1.5), (1, 1): (1.5, 2.5)}


def random_work(schedule: ScheduleName, seed: int) -> tuple[Workload, Network]:
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    stages = ranks * (1 if schedule in ONE_STAGE_PER_RANK else 2)
    microbatches = draw.choice((1, 2)) * ranks

    def messages() -> tuple[Message, ...]:
        return tuple(
            Message(draw.randint(1, 10**6), draw.random() / 9, draw.random() / 9)
            for _ in range(stages - 1)
        )

    found = Workload(
        replicas=1,
        forward_s=tuple(draw.random() for _ in range(stages)),
        backward_s=tuple(draw.random() for _ in range(stages)),
        activations=messages(),
        gradients=messages(),
        microbatches=microbatches,
        schedule=schedule,
        ranks_per_pipeline=ranks,
    )
    rates = tuple(tuple(draw.uniform(2e6, 3e7) for _ in range(ranks)) for _ in range(ranks))
    return found, Network(rates, ((0.1,) * ranks,) * ranks)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
@pytest.mark.parametrize("seed", range(2))
def test_everything_starts_as_soon_as_it_can(schedule: ScheduleName, seed: int) -> None:
    """Compute after the rank's last action and its input, codecs after their last message."""
    found, network = random_work(schedule, seed)
    step, payload = simulate(found, network), network.payload()
    assert step.step_s == max(event.end_s for event in step.events if event.computes)
    left = {(t.cut, t.direction, t.microbatch): t for t in step.transfers}
    for rank, order in enumerate(found.orders):
        own = [event for event in step.events if event.rank == rank and event.computes]
        kinds = [(kind.replace("I", "B"), stage, m) for kind, stage, m in order]
        assert [(event.kind, event.stage, event.microbatch) for event in own] == kinds
        for (kind, stage, m), event, before in zip(order, own, [None, *own], strict=False):
            free_s = 0.0 if before is None else before.end_s
            other = stage - 1 if kind == "F" else stage + 1
            if kind == "W" or not 0 <= other < found.stages or found.position_of[other] == rank:
                assert event.start_s == free_s
                continue
            direction = DIRECTIONS[0] if kind == "F" else DIRECTIONS[1]
            transfer = left[min(stage, other), direction, m]
            way = found.activations if kind == "F" else found.gradients
            message = way[min(stage, other)]
            decoded_s = min(
                e.end_s
                for e in step.events
                if (e.kind, e.stage, e.microbatch) == ("decode", stage, m)
                if e.end_s >= transfer.end_s + message.decode_s - 1e-9
            )
            assert event.start_s == pytest.approx(max(free_s, decoded_s), abs=1e-9)
            link = found.position_of[other], rank
            least_s = payload.link_s(*link, message.nbytes) + 0.1
            assert transfer.end_s - transfer.start_s >= least_s - 1e-9
