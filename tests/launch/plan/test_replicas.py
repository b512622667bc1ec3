"""Machines of a pipeline as replicas: the arithmetic of a step."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.training import TORCH_2_13, config
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.cuts.profile import BlockCost
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Network
from thinpipe.launch.memory.model import BlockRun, ModelMemory
from thinpipe.launch.plan import replicas
from thinpipe.launch.plan.losses import Measured
from thinpipe.launch.plan.predict import predict
from thinpipe.launch.plan.replicas import replica_steps, show_replicas

MBIT = 1e6 / PAYLOAD_SHARE  # on the wire, so that a megabit of payload goes through
PIPELINE = {"schedule": "GPipe", "microbatches": 4, "cuts": [1, 3]}
RUN = config(pipeline=PIPELINE)
BLOCK = BlockCost(0.1, 0.2, optimizer_s=0.05)
MEMORY = [BlockRun(ModelMemory.of(1_600_000, 250_000, 7), 4)]
BLOCKS = [[BLOCK] * 4] * 3
SLOW = Network.uniform(3, MBIT, 0.1)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The run's own method, and these."""
    monkeypatch.setattr(replicas, "measured", list)
    monkeypatch.setattr(replicas, "method_names", lambda: names)


@pytest.mark.slow
def test_a_step_is_compute_and_what_the_exchange_adds() -> None:
    """Four microbatches among three machines are two each; 1 M trained parameters, 1 Mbit/s."""
    found = replica_steps(RUN, BLOCKS, SLOW, MEMORY)
    steps = {step.method: step for step in found}
    compute_s = 2 * 4 * 0.3 + 4 * 0.05
    for step in steps.values():
        wire_s = 8 * step.cost.nbytes * 1e6 / 1e6 + 2 * 0.1
        assert step.exchange_s == pytest.approx(wire_s, rel=1e-4)
        beside = max(compute_s, wire_s)
        together_s = beside if step.cost.overlaps else compute_s + wire_s
        assert step.step_s == pytest.approx(together_s, rel=1e-4)
    assert steps["allreduce"].step_s > 40
    (cocktail,) = (step for label, step in steps.items() if label.startswith("cocktail"))
    assert cocktail.step_s == pytest.approx(compute_s)
    # diloco keeps a global copy of what is trained, and a momentum
    kept = steps["diloco"].memory - steps["allreduce"].memory
    assert kept == pytest.approx(2 * 8 * 4 * 250_000, rel=0.01)  # and in checkpoints
    assert {label.partition(" ")[0] for label in steps} == set(method_names()) - {"none"}
    assert len(steps) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [False, True])
def test_who_ends_as_well_as_all_reduce_comes_first(
    tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [
        Measured("topk", {"bits": 4}, fine_tuning=0.2, from_scratch=0.0),
        Measured("allreduce", {}, 0.0, 0.0),
        Measured("sparse_loco", {}, fine_tuning=0.009),
        Measured("powersgd", {}, from_scratch=0.02),
    ]
    monkeypatch.setattr(replicas, "measured", lambda: known)
    monkeypatch.setattr(RunConfig, "pretrained", tuned)
    found = replica_steps(RUN, BLOCKS, SLOW, MEMORY)
    first, second, *others = found
    labels = ["sparse_loco", "allreduce"] if tuned else ["topk bits=4", "allreduce"]
    assert [first.method, second.method] == labels
    assert all(step.loss is None or step.loss > 0.01 for step in others)
    assert [step.step_s for step in others] == sorted(step.step_s for step in others)


@pytest.mark.slow
def test_the_runs_own_options_are_counted() -> None:
    run = RUN.updated(gradcomp={"method": "topk", "topk": {"fraction": 0.5}})
    found = {step.method: step for step in replica_steps(run, BLOCKS, SLOW, MEMORY)}
    assert found["topk fraction=0.5"].loss is None


def test_the_slowest_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    half = [[replace(BLOCK, forward_s=0.2, backward_s=0.4)] * 4, *BLOCKS[1:]]
    run = RUN.updated(gradcomp={"method": "cocktail"})
    even, uneven = (replica_steps(run, blocks, SLOW, MEMORY)[0] for blocks in (BLOCKS, half))
    assert uneven.step_s > 1.5 * even.step_s


@TORCH_2_13
def test_the_machines_of_all_shards_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes half of a stage: six machines do the work of two pipelines of three."""
    only(monkeypatch)
    run = config(pipeline=PIPELINE | {"microbatches": 6, "shards": 2}, train={"batch_size": 12})
    (step,) = replica_steps(run, BLOCKS, SLOW, MEMORY)
    assert step.cost.nbytes == pytest.approx(4 * 2 * 5 / 6, rel=1e-3)
    assert step.step_s - step.exchange_s == pytest.approx(2 * 4 * 0.3 + 4 * 0.05)


def test_the_machines_of_all_replicas_of_a_pipeline_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines of three machines have 8 microbatches: two for each of six but two."""
    only(monkeypatch)
    run = config(pipeline=PIPELINE | {"replicas": 2}, train={"batch_size": 16})
    both = Network.uniform(6, MBIT, 0.1)
    one, six = (replica_steps(run, BLOCKS, links, MEMORY)[0] for links in (SLOW, both))
    for step in (one, six):
        assert step.step_s - step.exchange_s == pytest.approx(2 * 4 * 0.3 + 4 * 0.05)
    assert six.cost.nbytes == pytest.approx(4 * 2 * 5 / 6, rel=1e-3)


def test_it_is_shown_beside_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "low_precision_decentralized", "topk")
    keys = [(1, "forward"), (1, "backward"), (3, "forward"), (3, "backward")]
    given = predict(RUN, BLOCKS, dict.fromkeys(keys, Message(100_000)), SLOW)  # type: ignore[arg-type]
    console = Console(file=StringIO(), width=80)
    show_replicas(console, RUN, BLOCKS, given, SLOW, MEMORY)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    best = min(replica_steps(RUN, BLOCKS, SLOW, MEMORY), key=lambda step: step.step_s)
    assert "the same machines as 3 replicas of the whole model" in output
    (line,) = (line for line in output.splitlines() if "low_precision_decentralized" in line)
    assert "*" in line
    assert len(line) <= 80
    assert f"{given.step_s / best.step_s:.2f}" in output


def test_options_that_do_not_fit_as_many_replicas_are_not_used_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pairs of three machines; `decentralized` meets them on a ring instead."""
    only(monkeypatch)
    exchange = {"method": "decentralized", "decentralized": {"peers": "pairs"}}
    run = config(pipeline=PIPELINE, gradcomp=exchange)
    (step,) = replica_steps(run, BLOCKS, SLOW, MEMORY)
    assert step.method == "decentralized (defaults)"
