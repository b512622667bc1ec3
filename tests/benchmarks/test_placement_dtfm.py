"""DT-FM's search, which layouts are compared with."""

import pytest

from benchmarks.placement.dtfm_search import genetic_search
from tests.launch.plan.placement.networks import random_cluster
from thinpipe.launch.plan.placement.dtfm import DtfmCost, DtfmSizes


@pytest.mark.slow
def test_the_genetic_search_is_reproducible_and_its_children_are_better() -> None:
    cost = DtfmCost.of(random_cluster(20, 3), DtfmSizes(4, 5, 0.3, 0.2))
    runs = [genetic_search(cost, seed=5, candidates=400) for _ in range(2)]
    assert (runs[0][0] == runs[1][0]).all()
    assert (runs[0][1] == runs[1][1]).all()
    assert runs[0][1][100:].mean() < runs[0][1][:100].mean()
    assert cost.grid_cost(runs[0][0]) == pytest.approx(runs[0][1].min())
    assert sorted(runs[0][0].ravel()) == list(range(20))
