"""Stages, replicas, cuts, microbatches and places together, from a run file's settings."""

from collections.abc import Iterator

import pytest
from rich.console import Console

from thinpipe.launch.config.placement import check_placement
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.profile import BlockCost
from thinpipe.launch.memory.model import ModelMemory
from thinpipe.launch.plan.choice.choose import PlannedRun, choose
from thinpipe.launch.plan.choice.fidelity import exchanges
from thinpipe.launch.plan.cli import show_choice
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.cluster_files import parse_cluster
from thinpipe.launch.plan.placement.workload import count_exchange

BLOCK = BlockCost(0.02, 0.04, 0.001)
MEMORY = ModelMemory.of(4 * 10**6, 10**6)
CONFIG = {
    "model": {"layers": 4, "width": 64, "heads": 4},
    "data": {"sequence_length": 32},
    "pipeline": {"cuts": [2], "microbatches": 4, "device": "cpu"},
    "train": {"batch_size": 16},
}


TUNED = {**CONFIG, "train": {"batch_size": 16, "epochs": 4}}


def cluster(*, gbps: float = 1.0, memory_gb: float | None = None) -> Cluster:
    """Two machines each in two regions."""
    here = {"hosts": 2} | ({} if memory_gb is None else {"memory_gb": memory_gb})
    links = [["Ohio", "Tokyo", 80, gbps]]
    regions = {"Ohio": here, "Tokyo": here}
    inside = {"latency_ms": 1, "gbps": 1}
    return parse_cluster({"regions": regions, "inside": inside, "links": links})


def pair(gbps: float, latency_ms: float = 1, **fields: float) -> Cluster:
    """Two machines."""
    inside = {"latency_ms": latency_ms, "gbps": gbps}
    return parse_cluster({"regions": {"here": {"hosts": 2, **fields}}, "inside": inside})


def chosen(found: Cluster, *, run: dict[str, object] = CONFIG) -> list[PlannedRun]:
    blocks, memory = [BLOCK] * 4, [MEMORY] * 4
    return choose(RunConfig.model_validate(run), blocks, found, memory=memory)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """The networks are small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("thinpipe.launch.plan.placement.solve._MOST_SIMULATIONS", 20)
        patched.setattr("thinpipe.launch.plan.choice.choose._TIMES", (1,))
        patched.setattr("thinpipe.launch.plan.choice.choose.ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def choices() -> list[PlannedRun]:
    return chosen(cluster())


def test_the_shortest_step_comes_first_is_valid_and_printed_with_its_reasons(
    choices: list[PlannedRun],
) -> None:
    steps = [choice.cost.step_s for choice in choices]
    assert steps == sorted(steps)
    pipeline = choices[0].config.pipeline
    check_placement(pipeline.model_copy(update={"placement": choices[0].hosts(cluster())}))
    console = Console(record=True, width=200)
    show_choice(console, cluster(), choices)
    text = console.export_text()
    used = [host for row in choices[0].hosts(cluster()) for host in row]
    hosts = [f"{host} ({host.partition('-')[0]})" for host in used]
    for words in ("predicted step", "Limit: ", choices[1].name, *hosts):
        assert words in text


def test_far_machines_stay_idle_behind_a_link_that_would_cost_more() -> None:
    used = {host for row in chosen(cluster(gbps=1e-4))[0].hosts(cluster()) for host in row}
    assert used in ({"Ohio-0", "Ohio-1"}, {"Tokyo-0", "Tokyo-1"})


@pytest.mark.slow
def test_a_model_that_fits_no_machine_is_cut() -> None:
    """A block takes 16 MB, 12 in a checkpoint's copy, and 20 % between tensors."""
    for choice in chosen(cluster(memory_gb=0.25)):
        assert choice.config.pipeline.stages >= 2
    with pytest.raises(ValueError, match="no number of stages and replicas fits the network"):
        chosen(cluster(memory_gb=0.15))


@pytest.mark.slow
def test_the_exchange_is_as_faithful_as_the_links_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of 4 M parameters that are tuned; they compute for about a second."""
    monkeypatch.setattr(RunConfig, "pretrained", True)
    rates = (10.0, 0.02, 0.0015)
    quick, middling, slowest = (chosen(pair(gbps), run=TUNED)[0] for gbps in rates)
    assert all(choice.workload.stages == 1 for choice in (quick, middling))
    assert quick.gradcomp == {"method": "allreduce", "allreduce": {}}
    fractions = [choice.gradcomp["ef_gradients"]["fraction"] for choice in (middling, slowest)]
    assert 0.25 >= fractions[0] > fractions[1] == 0.015


@pytest.mark.parametrize(("pretrained", "count"), [(True, 5), (False, 2)])
def test_exchanges_are_offered_from_the_fewest_bytes_to_the_most(
    pretrained: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None from scratch that ended above all-reduce there."""
    monkeypatch.setattr(RunConfig, "pretrained", pretrained)
    run = RunConfig.model_validate({**CONFIG, "pipeline": {"replicas": 2}})
    offered = exchanges(run)
    costs = [count_exchange(run.updated(gradcomp=each)) for each in offered]
    sent = [cost.nbytes for cost in costs if cost is not None]
    assert len(sent) == len(offered) == count
    assert sent == sorted(sent)


def test_a_method_with_an_optimizer_of_its_own_is_kept() -> None:
    run = {**TUNED, "gradcomp": {"method": "demo"}}
    assert chosen(pair(10.0), run=run)[0].gradcomp["method"] == "demo"


@pytest.mark.slow
def test_bits_are_raised_where_links_allow_it() -> None:
    """A model of 4 blocks that a machine has no memory for."""
    wide = {**TUNED, "model": {"layers": 4, "width": 512, "heads": 4}}
    found = {}
    for gbps in (10.0, 0.005):
        best = chosen(pair(gbps, memory_gb=0.25), run=wide)[0]
        assert best.config.pipeline.stages == 2
        found[gbps] = best.specs[best.config.pipeline.cuts[0], "forward"].fidelity("forward")
    assert found[10.0] == 32
    assert found[0.005] < 8


def test_another_schedule_is_chosen_where_it_is_faster() -> None:
    """Two stages far apart: GPipe waits for every message, Deep1F1B hides them."""
    pipeline = {"cuts": [2], "microbatches": 16, "schedule": "1F1B", "device": "cpu"}
    far = pair(1, latency_ms=200, memory_gb=0.25)
    best = chosen(far, run={**CONFIG, "pipeline": pipeline})[0]
    assert best.config.pipeline.schedule in ("Deep1F1B", "GPipe")
