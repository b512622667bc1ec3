"""The solver on networks that are small enough to try everything, and laws for any network."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tests.launch.plan.placement.networks import random_cluster, small_workload
from tests.often import mostly_slow
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.network import Host
from thinpipe.launch.plan.placement.anneal_step import devices_of, estimate_step, plan_of
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.solve import solve_step
from thinpipe.launch.plan.placement.step import StepModel, link_nbytes, step_bound


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", mostly_slow(range(4), lambda seed: seed == 0))
def test_the_shortest_step_of_a_small_network_is_found(seed: int, overlaps: bool) -> None:
    cluster = random_cluster(5, seed, symmetric=False, speeds=True)  # one stays idle
    work = small_workload(2, 2, seed, overlaps=overlaps)
    model = StepModel(cluster, work)
    every = itertools.permutations(range(5), 4)
    best = min(model(np.array(order).reshape(2, 2)).step_s for order in every)
    found = solve_step(cluster, work, seed=seed, rounds=6)
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert model(found.grid_RP).step_s == pytest.approx(found.cost, rel=1e-12)
    assert step_bound(cluster, work) <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_no_layout_that_uses_all_devices_is_below_the_bound(seed: int) -> None:
    cluster = random_cluster(6, seed, symmetric=False, speeds=True)
    work = small_workload(2, 3, seed)
    model = StepModel(cluster, work)
    every = itertools.permutations(range(6))
    best = min(model(np.array(order).reshape(3, 2)).step_s for order in every)
    assert 0.3 * best < step_bound(cluster, work) <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_is_close_to_the_simulated_step(seed: int) -> None:
    """It only has to order layouts; without bubbles between messages it is exact."""
    cluster = random_cluster(12, seed, symmetric=False, speeds=True)
    work = small_workload(4, 3, seed)
    model, devices, plan = StepModel(cluster, work), devices_of(cluster), plan_of(work)
    draws = np.random.default_rng(seed)
    for _ in range(5):
        place_D = draws.permutation(12)
        cost = model(place_D.reshape(4, 3).T)
        simulated_s = cost.step_s - cost.optimizer_s - cost.latency_s
        assert estimate_step(devices, plan, place_D, 3) == pytest.approx(simulated_s, rel=0.35)


def test_the_estimate_of_a_single_microbatch_is_exact() -> None:
    cluster = random_cluster(4, 0, symmetric=False, speeds=True)
    work = dataclasses.replace(small_workload(4, 1, 0), microbatches=1)
    model = StepModel(cluster, work)
    order = np.array([2, 0, 3, 1])
    found = estimate_step(devices_of(cluster), plan_of(work), order, 1)
    assert found == pytest.approx(model(order[None]).passes_s, rel=1e-12)


def test_a_seed_gives_the_same_layout_however_the_search_is_ended() -> None:
    cluster, work = random_cluster(12, 4, speeds=True), small_workload(3, 4, 4)
    timed = solve_step(cluster, work, seed=7, seconds=0.1)
    again = solve_step(cluster, work, seed=7, rounds=timed.rounds)
    assert again.cost == timed.cost
    assert (again.grid_RP == timed.grid_RP).all()


def test_more_rounds_are_not_worse() -> None:
    cluster, work = random_cluster(12, 4, speeds=True), small_workload(3, 4, 4)
    costs = [solve_step(cluster, work, rounds=rounds).cost for rounds in (0, 1, 3)]
    assert costs == sorted(costs, reverse=True)


def equal_links(hosts: list[Host]) -> Cluster:
    shape = (len(hosts), len(hosts))
    return Cluster(tuple(hosts), np.full(shape, 1e9), np.zeros(shape))


def test_slow_devices_stay_idle_when_there_are_others() -> None:
    alike = equal_links([Host(name=f"h{n}", speed=0.1 if n in (0, 3) else 1.0) for n in range(6)])
    found = solve_step(alike, small_workload(2, 2, 0), rounds=2)
    assert not {0, 3} & set(found.grid_RP.ravel().tolist())


def test_a_stage_goes_where_its_memory_is() -> None:
    alike = equal_links([Host(name=f"h{n}", memory_gb=8 if n in (1, 4) else 2) for n in range(6)])
    work = dataclasses.replace(small_workload(3, 2, 0), memory=(1e9, 1e9, 5e9))
    assert set(solve_step(alike, work, rounds=2).grid_RP[:, 2].tolist()) == {1, 4}


def test_a_stage_that_fits_nowhere_is_rejected() -> None:
    alike = equal_links([Host(name=f"h{n}", memory_gb=4) for n in range(4)])
    work = dataclasses.replace(small_workload(2, 2, 0), memory=(1e9, 5e9))
    with pytest.raises(ValueError, match="stage 1 needs 5 GB and only 0 of 4 devices have that"):
        solve_step(alike, work)


def test_messages_are_counted_on_the_links_that_carry_them() -> None:
    cluster = random_cluster(4, 0)
    work = dataclasses.replace(
        small_workload(2, 2, 0),
        activations=(Message(10),),
        gradients=(Message(1),),
        exchange_nbytes=(100.0, 200.0),
        microbatches=3,
    )
    sent = link_nbytes(cluster, work, np.array([[0, 1], [2, 3]]))
    assert (sent[0, 1], sent[1, 0], sent[2, 3], sent[3, 2]) == (30, 3, 30, 3)
    assert (sent[0, 2], sent[2, 0], sent[1, 3], sent[3, 1]) == (100, 100, 200, 200)
    assert sent.sum() == 66 + 600


def test_an_exchange_beside_compute_is_no_longer_than_both() -> None:
    cluster, grid = random_cluster(4, 0), np.array([[0, 1], [2, 3]])
    work = small_workload(2, 2, 0)
    after = StepModel(cluster, work)(grid)
    beside = StepModel(cluster, dataclasses.replace(work, overlaps=True))(grid)
    assert max(beside.passes_s, beside.exchange_s) <= beside.step_s < after.step_s
    assert beside.step_s < math.inf
