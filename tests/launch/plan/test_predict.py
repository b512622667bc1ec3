"""Predictions and recommendations of a plan, compared with sums done by hand."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.training import SCHEDULES, config
from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.launch.cuts.message_cost import Message, measure_message, measure_messages
from thinpipe.launch.cuts.profile import BlockCost, measure_blocks
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import WireKey, format_duration
from thinpipe.launch.memory.microbatches import microbatch_shape
from thinpipe.launch.plan.bits import (
    Candidate,
    Candidates,
    allocate_bits,
    measure_candidates,
    recommend,
)
from thinpipe.launch.plan.predict import predict, show_suggestions
from thinpipe.pipeline.config import DirectConfig, RawConfig
from thinpipe.pipeline.orders import ONE_STAGE_PER_RANK
from thinpipe.pipeline.wire.header import HEADER_NBYTES
from thinpipe.pipeline.wire.told import DIRECTIONS, ScheduleName

MBIT = 1e6 / PAYLOAD_SHARE  # on the wire, so that a megabit of payload goes through
PIPELINE = {"schedule": "GPipe", "microbatches": 4, "cuts": [1, 3]}
RUN = config(pipeline=PIPELINE)
BLOCK = BlockCost(1.0, 2.0, optimizer_s=0.5)
BLOCKS = [[BLOCK] * 4] * 3
KEYS: list[WireKey] = [(1, "forward"), (1, "backward"), (3, "forward"), (3, "backward")]
SILENT = dict.fromkeys(KEYS, Message(0))


def test_a_step_is_the_pipeline_then_the_loss_exchange_then_the_optimizer() -> None:
    found = predict(RUN, BLOCKS, SILENT, Network.uniform(3, None, 0.1))
    # stages of 1, 2, 1 blocks: 3 more turns of the slowest after the first passes through all
    simulated_s = 3 * 2.0 + 4.0 + 4 * 0.1 + 8.0 + 3 * 4.0
    assert found.step_s == pytest.approx(simulated_s + 0.1 + 2 * 0.5)
    assert found.unlimited_s == pytest.approx(found.step_s - 5 * 0.1)
    assert found.bubble == pytest.approx(1 - 4 * 12.0 / (3 * found.step_s))


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "replicas", "count", "largest"),
    [(16, 1, 1, 8, 2), (6, 1, 1, 6, 1), (12, 2, 2, 3, 1), (60, 2, 2, 8, 2)],
)
def test_a_step_has_the_microbatches_that_training_fits_to_its_batch(
    batch_size: int, accumulate: int, replicas: int, count: int, largest: int
) -> None:
    pipeline = {**PIPELINE, "microbatches": 8, "replicas": replicas}
    train = {"batch_size": batch_size, "accumulate": accumulate}
    run = config(pipeline=pipeline, train=train)
    assert microbatch_shape(run)[0] == largest
    found = predict(run, BLOCKS, SILENT, Network.uniform(3))
    assert found.work.microbatches == count
    assert found.bubble == pytest.approx(1 - accumulate * count * 12.0 / (3 * found.step_s))


def test_blocks_that_are_alike_are_measured_once() -> None:
    costs = measure_blocks(RUN).costs
    assert costs[1] == costs[2]
    assert len(costs) == 4
    assert all(c.forward_s > 0 and c.backward_s > 0 and c.optimizer_s > 0 for c in costs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_predicted(schedule: ScheduleName) -> None:
    run = config(pipeline={"schedule": schedule, "microbatches": 4, "cuts": [1, 2, 3]})
    ranks, blocks = (4 if schedule in ONE_STAGE_PER_RANK else 2), [[BLOCK] * 4] * 4
    assert run.pipeline.pipeline_ranks == ranks
    keys: list[WireKey] = [(cut, direction) for cut in (1, 2, 3) for direction in DIRECTIONS]
    messages = dict.fromkeys(keys, Message(0))
    free = predict(run, blocks, messages, Network.uniform(ranks))
    busy_s = 4 * 4 * 3.0 / ranks  # of each rank
    assert busy_s < free.step_s == free.unlimited_s < busy_s + 4 * 3.0
    assert free.bubble == pytest.approx(1 - busy_s / free.step_s)
    far = predict(run, blocks, messages, Network.uniform(ranks, None, 0.1))
    assert far.step_s > free.step_s
    assert far.slot_s == 4 * 3.0 / ranks
    path = allocate_bits(
        (1, 2, 3),
        {key: DOWN if key[1] == "forward" else UP for key in keys},
        Network.uniform(ranks, 8 * MBIT),
        slot_s=0.25,
        ranks=far.work.position_of,
    )
    sent = {key: message.nbytes for key, message in path[-1].messages.items()}
    within = [cut for cut in (1, 2, 3) if len({*far.work.position_of[cut - 1 : cut + 1]}) == 1]
    assert all(sent[cut, direction] == 320_000 for cut in within for direction in DIRECTIONS)


def test_messages_are_those_of_a_known_sample() -> None:
    shape = torch.Size((2, 12, 16))
    found = measure_message(DirectConfig(bits=4), shape, 1)
    assert found.nbytes == HEADER_NBYTES + 2 * 12 * (2 + 16 // 2)
    assert found.encode_s > 0
    assert found.decode_s > 0


@pytest.mark.parametrize(("epochs", "bits"), [(1, 8), (2, 3)])
def test_in_one_epoch_every_visit_is_the_first(epochs: int, bits: int) -> None:
    forward = {"kind": "aqsgd", "bits": 3, "delta": "uniform", "first_visit": 8}
    sent = {"forward": forward, "backward": {"kind": "raw"}}
    run = config(boundary=[sent], train={"epochs": epochs})  # type: ignore[arg-type]
    found = measure_messages(run)[2, "forward"]
    assert found.nbytes == HEADER_NBYTES + 2 * 12 * (2 + bits * 16 // 8)


def test_in_one_epoch_no_change_is_recommended_and_activations_get_bits_first() -> None:
    again = measure_candidates(config(train={"epochs": 2}))[2, "forward"]
    assert {candidate.spec.kind for candidate in again} == {"aqsgd", "raw"}
    found = measure_candidates(config(train={"epochs": 1}))
    kinds = [candidate.spec.kind for candidate in found[2, "forward"]]
    assert kinds == ["stateless"] * 4 + ["raw"] * 2
    path = allocate_bits((2,), found, Network.uniform(2), slot_s=1.0)
    names = [[advice.specs[2, d].words() for d in DIRECTIONS] for advice in path]
    assert names[:5] == [
        ["stateless 4-bit", "stateless 3-bit"],
        ["stateless 5-bit", "stateless 3-bit"],
        ["stateless 5-bit", "stateless 4-bit"],
        ["stateless 6-bit", "stateless 4-bit"],
        ["stateless 6-bit", "direct 6-bit"],
    ]


@pytest.mark.parametrize("epochs", [1, 2])
def test_more_fidelity_takes_more_bytes(epochs: int) -> None:
    run = config(model={"width": 128}, train={"epochs": epochs})
    for of_direction in measure_candidates(run).values():
        nbytes = [candidate.message.nbytes for candidate in of_direction]
        assert nbytes == sorted(set(nbytes))


WIDE: dict[str, dict[str, Any]] = {
    "model": {"width": 128, "context": 64},
    "data": {"sequence_length": 64},
}


@pytest.mark.parametrize(("epochs", "levels"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 5)])
def test_learned_transforms_take_fewer_bytes_for_more_fidelity(epochs: int, levels: int) -> None:
    run = config(**WIDE, train={"epochs": epochs})
    plain = measure_candidates(run)
    for key, ladder in measure_candidates(run, learned=True).items():
        fidelities = [candidate.spec.fidelity(key[1]) for candidate in ladder]
        assert fidelities == sorted(fidelities)
        learned = [candidate for candidate in ladder if candidate.spec.kind == "transform"]
        assert len(learned) == levels
        best = learned[-1].spec.fidelity(key[1])
        as_good = [c.message.nbytes for c in plain[key] if c.spec.fidelity(key[1]) >= best]
        assert plain[key][0].spec.fidelity(key[1]) < best
        assert learned[-1].message.nbytes < min(as_good)


@pytest.mark.parametrize(
    ("from_run", "expected"), [("run", True), pytest.param(None, False, marks=pytest.mark.slow)]
)
def test_learned_transforms_are_recommended_to_models_that_were_trained(
    from_run: str | None, expected: bool
) -> None:
    model = {**WIDE["model"], "from_run": from_run}
    run, network = config(**{**WIDE, "model": model}, pipeline=PIPELINE), Network.uniform(3, 3e4)
    given = predict(run, BLOCKS, measure_messages(run), network)
    found = recommend(run, BLOCKS, given, network)
    assert found is not None
    kinds = {spec.kind for spec in found[0].specs.values()}
    assert ("transform" in kinds) == expected


def test_other_settings_of_the_run_file_stay_where_they_can() -> None:
    forward = {"kind": "aqsgd", "bits": 2, "memory": 8, "delta": "tiles"}
    backward = {"kind": "direct", "bits": 3, "rounding": "stochastic"}
    run = config(boundary=[{"forward": forward, "backward": backward}])  # type: ignore[arg-type]
    found = measure_candidates(run)
    for candidate in found[2, "forward"][:-2]:
        assert (candidate.spec.memory, candidate.spec.delta) == (8, None)
    for candidate in found[2, "backward"][2:-2]:
        assert candidate.spec.rounding == "stochastic"


CASTS = {16: RawConfig(format="bf16"), 32: RawConfig(format="fp32")}


def candidates(kind: type[AqsgdConfig | DirectConfig], nbytes: dict[int, int]) -> list[Candidate]:
    """Candidates of one kind by their bits."""
    return [Candidate(CASTS.get(bits) or kind(bits=bits), Message(n)) for bits, n in nbytes.items()]


DOWN = candidates(
    AqsgdConfig, {2: 20_000, 3: 30_000, 4: 40_000, 6: 60_000, 8: 80_000, 16: 160_000, 32: 320_000}
)
UP = candidates(DirectConfig, {4: 40_000, 6: 60_000, 8: 80_000, 16: 160_000, 32: 320_000})
CANDIDATES: Candidates = {(cut, d): DOWN if d == "forward" else UP for cut, d in KEYS}


def test_the_highest_fidelity_that_overlaps_is_recommended() -> None:
    def chosen(slot_s: float) -> list[int]:
        advice = allocate_bits((1,), CANDIDATES, Network.uniform(2, 8 * MBIT), slot_s=slot_s)[-1]
        assert advice.overlaps == (slot_s >= 0.04)
        return [advice.messages[1, "forward"].nbytes, advice.messages[1, "backward"].nbytes]

    assert chosen(1.0) == [320_000, 320_000]  # fp32: nothing to gain from less
    assert chosen(0.1) == [80_000, 80_000]
    assert chosen(0.05) == [40_000, 40_000]
    assert chosen(0.01) == [20_000, 40_000]  # does not fit, which is reported


def test_nothing_is_recommended_that_is_predicted_to_be_slower() -> None:
    small = [{"forward": {"kind": "direct", "bits": 2}, "backward": {"kind": "direct", "bits": 4}}]
    run, network = config(pipeline=PIPELINE, boundary=small), Network.uniform(3, 3e3)  # type: ignore[arg-type]
    given = predict(run, BLOCKS, measure_messages(run), network)
    (*_, most) = allocate_bits((1, 3), measure_candidates(run), network, slot_s=6.0)
    slower = predict(run, BLOCKS, most.messages, network)
    assert slower.step_s > 1.1 * given.step_s  # yet it overlaps
    found = recommend(run, BLOCKS, given, network)
    assert found is None or found[1].step_s <= given.step_s


def test_fewer_bits_are_not_recommended_for_less_than_measurements_differ() -> None:
    """Own settings that are hardly slower, or as fast, are kept; clearly slower ones are not."""
    messages = measure_messages(RUN)
    largest = max(message.nbytes for message in messages.values())
    outcomes = []
    for transfer_s in (0.01, 30.0):  # of a message, against seconds of compute
        network = Network.uniform(3, 8 * largest / transfer_s)
        given = predict(RUN, BLOCKS, messages, network)
        found = recommend(RUN, BLOCKS, given, network)
        outcomes.append(found is not None)
        assert found is None or 1.05 * found[1].step_s <= given.step_s
    assert outcomes == [False, True]


def test_suggestions_for_a_large_bubble_are_simulated() -> None:
    console, network = Console(file=StringIO(), width=80), Network.uniform(3, None, 0.1)
    given = predict(RUN, BLOCKS, SILENT, network)
    show_suggestions(console, RUN, BLOCKS, given, network)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"bubble {given.bubble:.0%}; reduce it with" in output
    more = config(pipeline={**PIPELINE, "schedule": "Deep1F1B", "microbatches": 8})
    half = [[replace(BLOCK, forward_s=0.5, backward_s=1.0)] * 4] * 3
    best = predict(more, half, SILENT, network)
    result = f"step {format_duration(best.step_s)}, bubble {best.bubble:.0%}"
    assert f"pipeline.microbatches = 8, pipeline.schedule = 'Deep1F1B': {result}" in output


def test_a_stage_in_the_middle_shares_its_uplink() -> None:
    advice = allocate_bits((1, 3), CANDIDATES, Network.uniform(3, 8 * MBIT), slot_s=0.12)[-1]
    sent = advice.messages
    assert sent[3, "forward"].nbytes + sent[1, "backward"].nbytes <= 120_000
    assert sent[1, "forward"].nbytes + sent[3, "backward"].nbytes <= 120_000
    assert isinstance(advice.specs[1, "backward"], DirectConfig | RawConfig)


def test_one_slow_link_gets_fewer_bits_than_the_others() -> None:
    rates = ((None, 80 * MBIT, 80 * MBIT), (80 * MBIT, None, 4 * MBIT), (80 * MBIT,) * 2 + (None,))
    advice = allocate_bits((1, 3), CANDIDATES, Network(rates, ((0.0,) * 3,) * 3), slot_s=0.1)[-1]
    assert advice.messages[3, "forward"].nbytes == 40_000
    assert advice.messages[1, "forward"].nbytes == 320_000
