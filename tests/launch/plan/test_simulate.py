"""Steps small enough to solve by hand."""

from dataclasses import replace

import pytest

from thinpipe.launch.plan.network import Network
from thinpipe.launch.plan.simulate import Message, StepModel, simulate

FREE = Message(0)
ONE_SECOND = Message(125_000)  # at 1 Mbit/s
MBIT = 1e6


def two_stages(message: Message = FREE, *, microbatches: int = 2, **options: object) -> StepModel:
    model = StepModel(
        schedule="GPipe",
        microbatches=microbatches,
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.0),
        activations=(message,),
        gradients=(message,),
    )
    return replace(model, **options)


def work(model: StepModel, rank: int) -> list[tuple[str, float, float]]:
    return [
        (f"{event.kind}{event.microbatch}", event.start_s, event.end_s)
        for event in simulate(model).events
        if event.rank == rank and event.computes
    ]


def test_without_a_network_only_the_bubble_costs_time() -> None:
    model = two_stages(backward_s=(2.0, 2.0))
    assert work(model, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 7, 9)]
    assert work(model, 1) == [("F0", 1, 2), ("F1", 2, 3), ("B0", 3, 5), ("B1", 5, 7)]
    assert simulate(model).step_s == 9


def test_a_slow_link_carries_one_message_after_the_other() -> None:
    model = two_stages(
        Message(500_000), microbatches=3, network=Network.uniform(2, MBIT)
    )  # 4 s each
    step = simulate(model)
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
    model = two_stages(microbatches=3, network=Network.uniform(2, None, 10.0))
    assert simulate(replace(model, schedule="1F1B")).step_s == 48  # the third waits for the first
    assert simulate(replace(model, schedule="Deep1F1B")).step_s == 28


def test_codecs_delay_messages_but_not_compute() -> None:
    model = two_stages(Message(0, encode_s=0.5, decode_s=0.25))
    assert work(model, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 5.5, 6.5), ("B1", 6.5, 7.5)]
    assert work(model, 1) == [
        ("F0", 1.75, 2.75),
        ("F1", 2.75, 3.75),
        ("B0", 3.75, 4.75),
        ("B1", 4.75, 5.75),
    ]


def test_the_codec_of_a_direction_handles_one_message_at_a_time() -> None:
    model = two_stages(Message(0, encode_s=3.0, decode_s=4.0))
    codec = [
        (f"{event.kind}{event.microbatch}", event.rank, event.start_s, event.end_s)
        for event in simulate(model).events
        if event.kind in ("encode", "decode") and event.start_s < 12
    ]
    assert sorted(codec, key=lambda event: event[2]) == [
        ("encode0", 0, 1, 4),
        ("encode1", 0, 4, 7),
        ("decode0", 1, 4, 8),
        ("decode1", 1, 8, 12),
    ]
    assert work(model, 1) == [("F0", 8, 9), ("F1", 12, 13), ("B0", 13, 14), ("B1", 14, 15)]
    assert work(model, 0)[2:] == [("B0", 21, 22), ("B1", 25, 26)]


def test_codecs_of_the_two_directions_run_concurrently() -> None:
    model = two_stages(Message(0, encode_s=2.0, decode_s=2.0), schedule="1F1B")
    spans = {
        (event.kind, event.rank, event.microbatch): event.start_s
        for event in simulate(model).events
        if event.rank == 1 and event.kind in ("encode", "decode")
    }
    assert spans == {
        ("decode", 1, 0): 3,
        ("decode", 1, 1): 5,
        ("encode", 1, 0): 7,
        ("encode", 1, 1): 9,
    }


def test_both_directions_of_a_cut_are_used_at_once() -> None:
    fast = {"forward_s": (0.0, 0.0), "backward_s": (0.0, 0.0), "schedule": "1F1B"}
    model = two_stages(ONE_SECOND, microbatches=2, network=Network.uniform(2, MBIT), **fast)
    spans = {(t.direction, t.microbatch): (t.start_s, t.end_s) for t in simulate(model).transfers}
    assert spans["backward", 0] == spans["forward", 1] == (1, 2)


def test_a_stage_in_the_middle_sends_both_ways_through_one_uplink() -> None:
    model = StepModel(
        schedule="1F1B",
        microbatches=8,
        forward_s=(0.0,) * 3,
        backward_s=(0.0,) * 3,
        activations=(ONE_SECOND,) * 2,
        gradients=(ONE_SECOND,) * 2,
        network=Network.uniform(3, MBIT),
    )
    assert simulate(model).step_s >= 16  # 8 activations and 8 gradients


def test_a_slow_link_delays_its_own_messages_and_no_others() -> None:
    rates = ((None, 2 * MBIT, None), (2 * MBIT, None, MBIT), (None, 2 * MBIT, None))
    model = StepModel(
        schedule="GPipe",
        microbatches=2,
        forward_s=(0.0,) * 3,
        backward_s=(0.0,) * 3,
        activations=(ONE_SECOND,) * 2,
        gradients=(FREE,) * 2,
        network=Network(rates, ((0.0,) * 3,) * 3),
    )
    spans = {(t.cut, t.microbatch): (t.start_s, t.end_s) for t in simulate(model).transfers[:4]}
    assert spans == {(0, 0): (0, 0.5), (0, 1): (0.5, 1), (1, 0): (0.5, 1.5), (1, 1): (1.5, 2.5)}


def test_inconsistent_models_are_refused() -> None:
    with pytest.raises(ValueError, match="activations has 2 entries"):
        two_stages(activations=(FREE, FREE))
    with pytest.raises(ValueError, match="3 hosts for 2 stages"):
        simulate(two_stages(network=Network.uniform(3)))
    with pytest.raises(ValueError, match="one stage per rank"):
        simulate(two_stages(schedule="LoopedBFS"))
