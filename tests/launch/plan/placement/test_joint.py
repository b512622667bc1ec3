"""Stages, replicas, cuts, microbatches and places together, from a run file's settings."""

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from thinpipe.launch.config.placement import check_placement
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.cluster_files import parse_cluster
from thinpipe.launch.plan.placement.joint import Choice, choose
from thinpipe.launch.plan.placement.show import draw_choice, show_choice
from thinpipe.launch.plan.profile import BlockCost

BLOCK = BlockCost(0.02, 0.04, 0.001, parameters=10**6, trained=10**6, activations=10**6)
CONFIG = {
    "model": {"layers": 4, "width": 64, "heads": 4},
    "data": {"sequence_length": 32},
    "pipeline": {"cuts": [2], "microbatches": 4},
    "train": {"batch_size": 16},
}


def cluster(*, gbps: float = 1.0, memory_gb: float | None = None) -> Cluster:
    here = {"hosts": 2} | ({} if memory_gb is None else {"memory_gb": memory_gb})
    return parse_cluster(
        {
            "regions": {"Ohio": here, "Tokyo": here},
            "inside": {"latency_ms": 1, "gbps": 1},
            "links": [["Ohio", "Tokyo", 80, gbps]],
        }
    )


def chosen(found: Cluster, block: BlockCost = BLOCK) -> list[Choice]:
    return choose(RunConfig.model_validate(CONFIG), [block] * 4, found)


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    return chosen(cluster())


def test_the_shortest_step_comes_first_and_is_valid(choices: list[Choice]) -> None:
    steps = [choice.cost.step_s for choice in choices]
    assert steps == sorted(steps)
    pipeline = choices[0].config.pipeline
    placed = pipeline.model_copy(update={"placement": choices[0].hosts(cluster())})
    check_placement(placed)


def test_far_machines_stay_idle_behind_a_link_that_would_cost_more(choices: list[Choice]) -> None:
    used = {host for row in chosen(cluster(gbps=1e-4))[0].hosts(cluster()) for host in row}
    assert used in ({"Ohio-0", "Ohio-1"}, {"Tokyo-0", "Tokyo-1"})


def test_a_model_that_fits_no_machine_is_cut() -> None:
    """Weights, gradients and Adam of a block take 16 MB, and machines have 50."""
    big = dataclasses.replace(BLOCK, activations=0)
    for choice in chosen(cluster(memory_gb=0.05), big):
        assert choice.config.pipeline.stages >= 2
    with pytest.raises(ValueError, match="no number of stages and replicas fits the network"):
        chosen(cluster(memory_gb=0.01), big)


def test_the_choice_is_printed_with_its_reasons_and_drawn(
    choices: list[Choice], tmp_path: Path
) -> None:
    console = Console(record=True, width=200)
    show_choice(console, cluster(), choices)
    text = console.export_text()
    assert "predicted step" in text
    assert "Limit: " in text
    assert choices[1].name in text
    draw_choice(tmp_path / "picture.svg", cluster(), choices[0])
    assert (tmp_path / "picture.svg").stat().st_size > 10_000
