"""DT-FM's cost, its exact parts against all possibilities, and its search."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.placement.dtfm_search import (
    CASE_STUDY,
    DtfmCost,
    DtfmSizes,
    bottleneck_matching,
    genetic_search,
    open_path,
)
from tests.launch.plan.placement.networks import random_cluster
from thinpipe.launch.plan.placement.cluster import Cluster, Ints
from thinpipe.launch.plan.placement.cluster_files import parse_cluster

SMALL = (DtfmSizes(2, 2, 0.3, 0.2), DtfmSizes(3, 2, 0.3, 0.2), DtfmSizes(2, 3, 0.1, 0.5))


def released(groups: Ints, latency_ms: np.ndarray, gbps: np.ndarray, sizes: DtfmSizes) -> float:
    """The cost written as in the paper, by enumeration."""

    def data(group: Ints) -> float:
        return max(
            sum(
                2 * (latency_ms[a, b] / 1e3 + sizes.gradient_gb * 8 / (sizes.replicas * gbps[a, b]))
                for b in group
                if a != b
            )
            for a in group
        )

    def hop(first: Ints, second: Ints) -> float:
        return min(
            max(
                latency_ms[a, b] / 1e3 + sizes.activation_gb * 8 / gbps[a, b]
                for a, b in zip(first, order, strict=True)
            )
            for order in itertools.permutations(second)
        )

    path = min(
        sum(hop(groups[a], groups[b]) for a, b in itertools.pairwise(order))
        for order in itertools.permutations(range(len(groups)))
    )
    return max(map(data, groups)) + 2 * path


def matrices(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    return cluster.latency_DD * 1e3, cluster.rate_DD / 1e9


def test_the_constants_of_the_case_study_are_the_published_ones() -> None:
    assert CASE_STUDY.gradient_gb == 0.65
    assert CASE_STUDY.activation_gb == pytest.approx(0.47124922275543213, rel=1e-12)


@pytest.mark.parametrize("replicas_inside", [False, True])
def test_known_layouts_cost_what_was_published(replicas_inside: bool) -> None:
    """Eight instances of eight GPUs: 0 ms; 100 Gbit/s inside, 3.125 between them."""
    instance = np.arange(64) // 8
    gbps = np.where(instance[:, None] == instance[None], 100.0, 3.125)
    content = {
        "labels": [f"instance{n}" for n in instance],
        "latency_ms": np.zeros((64, 64)).tolist(),
        "gbps": gbps.tolist(),
    }
    cost = DtfmCost.of(parse_cluster(content), CASE_STUDY)
    grid = np.arange(64).reshape(8, 8)
    inside, between = 8 * CASE_STUDY.activation_gb / 100, 8 * CASE_STUDY.activation_gb / 3.125
    if replicas_inside:
        expected = 14 * 0.65 * 8 / 8 / 100 + 14 * between
    else:
        expected = 14 * 0.65 * 8 / 8 / 3.125 + 14 * inside
        grid = grid.T
    assert cost.grid_cost(grid) == pytest.approx(expected, abs=1e-9)
    assert cost.arrange(grid)[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("seed", range(3))
def test_the_cost_is_the_published_one(seed: int, sizes: DtfmSizes) -> None:
    devices = sizes.stages * sizes.replicas
    cluster = random_cluster(devices, seed)
    cost = DtfmCost.of(cluster, sizes)
    groups = np.random.default_rng(seed).permutation(devices).reshape(sizes.stages, -1)
    found, grid = cost.arrange(groups)
    expected = released(groups, *matrices(cluster), sizes)
    assert found == pytest.approx(expected, abs=1e-9)
    assert cost.grid_cost(grid) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_matching_and_path_equal_brute_force(seed: int) -> None:
    draws = np.random.default_rng(seed)
    size = 2 + seed % 4
    w = draws.integers(0, 9, (size, size)).astype(float)
    found, columns = bottleneck_matching(w)
    orders = list(itertools.permutations(range(size)))
    assert found == min(max(w[range(size), order]) for order in orders)
    assert max(w[range(size), columns]) == found
    assert sorted(columns) == list(range(size))
    w += w.T
    path = open_path(w)
    lengths = {o: sum(w[a, b] for a, b in itertools.pairwise(o)) for o in orders}
    assert lengths[tuple(path)] == min(lengths.values())


def test_names_of_devices_and_the_order_of_replicas_do_not_matter() -> None:
    sizes = DtfmSizes(3, 4, 0.3, 0.2)
    cluster = random_cluster(12, 0)
    cost = DtfmCost.of(cluster, sizes)
    draws = np.random.default_rng(0)
    grid = draws.permutation(12).reshape(3, 4)
    assert cost.grid_cost(grid[:, draws.permutation(4)]) == pytest.approx(cost.grid_cost(grid))
    assert cost.grid_cost(grid[::-1]) == pytest.approx(cost.grid_cost(grid))


def test_on_a_uniform_network_all_layouts_cost_the_same() -> None:
    content = {"regions": {"here": 12}, "inside": {"latency_ms": 5, "gbps": 2}}
    cost = DtfmCost.of(parse_cluster(content), DtfmSizes(3, 4, 0.3, 0.2))
    draws = np.random.default_rng(0)
    costs = [cost.grid_cost(draws.permutation(12).reshape(3, 4)) for _ in range(5)]
    assert costs == pytest.approx([costs[0]] * 5, rel=1e-12)


def test_twice_the_rate_and_half_the_latency_are_half_the_cost() -> None:
    cluster = random_cluster(12, 1)
    fast = Cluster(cluster.hosts, cluster.rate_HH * 2, cluster.latency_HH / 2)
    sizes, grid = DtfmSizes(3, 4, 0.3, 0.2), np.arange(12).reshape(3, 4)
    costs = [DtfmCost.of(one, sizes).grid_cost(grid) for one in (cluster, fast)]
    assert costs[0] == pytest.approx(2 * costs[1], rel=1e-12)


def test_too_few_devices_are_rejected() -> None:
    with pytest.raises(
        ValueError, match="8 stages x 8 replicas need 64 devices, the network has 4"
    ):
        DtfmCost.of(random_cluster(4, 0), CASE_STUDY)


def test_the_cost_of_one_replica_has_no_exchange() -> None:
    cost = DtfmCost.of(random_cluster(4, 0), DtfmSizes(4, 1, 0.3, 0.2))
    assert cost.data_cost(np.arange(4)[:, None]) == 0.0
    assert cost.arrange(np.arange(4)[:, None])[0] < math.inf


@pytest.mark.slow
def test_the_genetic_search_is_reproducible_and_its_children_are_better() -> None:
    cost = DtfmCost.of(random_cluster(20, 3), DtfmSizes(4, 5, 0.3, 0.2))
    runs = [genetic_search(cost, seed=5, candidates=400) for _ in range(2)]
    assert (runs[0][0] == runs[1][0]).all()
    assert (runs[0][1] == runs[1][1]).all()
    assert runs[0][1][100:].mean() < runs[0][1][:100].mean()
    assert cost.grid_cost(runs[0][0]) == pytest.approx(runs[0][1].min())
    assert sorted(runs[0][0].ravel()) == list(range(20))
