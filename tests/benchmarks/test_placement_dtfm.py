"""What DT-FM's results are compared with: its search, and a bound."""

import numpy as np
import pytest

from benchmarks.placement.dtfm_bound import dtfm_bound
from benchmarks.placement.dtfm_search import genetic_search
from tests.launch.plan.placement.networks import partitions, random_cluster
from thinpipe.launch.plan.placement.dtfm import DtfmCost, DtfmSizes

SMALL = (DtfmSizes(2, 2, 0.3, 0.2), DtfmSizes(3, 2, 0.3, 0.2), DtfmSizes(2, 3, 0.1, 0.5))


@pytest.mark.slow
def test_the_genetic_search_is_reproducible_and_its_children_are_better() -> None:
    cost = DtfmCost.of(random_cluster(20, 3), DtfmSizes(4, 5, 0.3, 0.2))
    runs = [genetic_search(cost, seed=5, candidates=400) for _ in range(2)]
    assert (runs[0][0] == runs[1][0]).all()
    assert (runs[0][1] == runs[1][1]).all()
    assert runs[0][1][100:].mean() < runs[0][1][:100].mean()
    assert cost.grid_cost(runs[0][0]) == pytest.approx(runs[0][1].min())
    assert sorted(runs[0][0].ravel()) == list(range(20))


@pytest.mark.parametrize("seed", range(9))
def test_no_layout_of_a_small_network_is_below_the_bound(seed: int) -> None:
    sizes = SMALL[seed % len(SMALL)]
    devices = sizes.stages * sizes.replicas
    cost = DtfmCost.of(random_cluster(devices, seed), sizes)
    every = partitions(list(range(devices)), sizes.replicas)
    best = min(cost.arrange(np.array(groups))[0] for groups in every)
    assert dtfm_bound(cost) <= best * (1 + 1e-12)
