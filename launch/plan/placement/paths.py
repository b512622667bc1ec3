"""The order of the stages: the cheapest path through all groups, with open ends.

Exact for up to 12 groups (Held and Karp 1962, O(2^n n^2)); beyond that the nearest neighbour from
every start, improved by reversals (2-opt) and moves of single groups until neither helps.
"""

from itertools import pairwise

import numpy as np

from thinpipe.launch.plan.placement.cluster import Floats, Ints
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

EXACT = 12
"""Groups for which the path is exact."""


def open_path(w_SS: Floats) -> tuple[float, Ints]:
    """Cost and order of the cheapest path found; `w_SS` is symmetric."""
    if len(w_SS) == 1:
        return 0.0, np.zeros(1, np.int64)
    order_S = _placement_exact(w_SS) if len(w_SS) <= EXACT else _placement_improved(w_SS)
    return float(sum(w_SS[a, b] for a, b in pairwise(order_S))), order_S


@compiled
def _placement_exact(w_SS):
    n = len(w_SS)
    full = (1 << n) - 1
    best = np.full((full + 1, n), np.inf)
    before = np.full((full + 1, n), -1, np.int64)
    for first in range(n):
        best[1 << first, first] = 0.0
    for visited in range(1, full + 1):
        for last in range(n):
            cost = best[visited, last]
            if cost == np.inf:
                continue
            for following in range(n):
                if visited >> following & 1:
                    continue
                grown = visited | 1 << following
                if cost + w_SS[last, following] < best[grown, following]:
                    best[grown, following] = cost + w_SS[last, following]
                    before[grown, following] = last
    order = np.empty(n, np.int64)
    last, visited = np.argmin(best[full]), full
    for index in range(n - 1, -1, -1):
        order[index] = last
        last, visited = before[visited, last], visited & ~(1 << last)
    return order


@compiled
def _placement_length(w_SS, order):
    total = 0.0
    for index in range(len(order) - 1):
        total += w_SS[order[index], order[index + 1]]
    return total


@compiled
def _placement_nearest(w_SS, first):
    n = len(w_SS)
    left = np.ones(n, np.bool_)
    order = np.empty(n, np.int64)
    order[0], left[first] = first, False
    for index in range(1, n):
        closest = -1
        for other in range(n):
            here = order[index - 1]
            if left[other] and (closest < 0 or w_SS[here, other] < w_SS[here, closest]):
                closest = other
        order[index], left[closest] = closest, False
    return order


@compiled
def _placement_improved(w_SS):
    n = len(w_SS)
    best = _placement_nearest(w_SS, 0)
    best_cost = _placement_length(w_SS, best)
    for first in range(n):
        order = _placement_nearest(w_SS, first)
        cost = _placement_length(w_SS, order)
        improved = True
        while improved:
            improved = False
            for i in range(n):
                for j in range(i + 1, n):
                    for kind in range(3):
                        trial = order.copy()
                        if kind == 0:
                            trial[i : j + 1] = order[i : j + 1][::-1]
                        elif kind == 1:
                            trial[i:j], trial[j] = order[i + 1 : j + 1], order[i]
                        else:
                            trial[i], trial[i + 1 : j + 1] = order[j], order[i:j]
                        length = _placement_length(w_SS, trial)
                        if length < cost - 1e-12 * cost:
                            order, cost, improved = trial, length, True
        if cost < best_cost:
            best, best_cost = order, cost
    return best
