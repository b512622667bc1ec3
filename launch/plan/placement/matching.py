"""Bottleneck matching: pair two groups so that the worst pair is as good as possible, exactly.

Binary search over the pairs' costs; each threshold is a bipartite matching by augmenting paths
(Kuhn 1955), O(n^3 log n) for groups of n. DT-FM calls the Hungarian method up to n^2 times.
"""

import numpy as np

from thinpipe.launch.plan.placement.cluster import Floats, Ints
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled


@compiled
def _placement_augment(w_NN, limit, row, partner_N, seen_N):
    for column in range(len(partner_N)):
        if w_NN[row, column] <= limit and not seen_N[column]:
            seen_N[column] = True
            other = partner_N[column]
            if other < 0 or _placement_augment(w_NN, limit, other, partner_N, seen_N):
                partner_N[column] = row
                return True
    return False


@compiled
def _placement_matched(w_NN, limit, partner_N):
    n = len(partner_N)
    partner_N[:] = -1
    seen_N = np.zeros(n, np.bool_)
    for row in range(n):
        seen_N[:] = False
        if not _placement_augment(w_NN, limit, row, partner_N, seen_N):
            return False
    return True


@compiled
def bottleneck_matching(w_NN: Floats) -> tuple[float, Ints]:
    """The least possible worst cost of a perfect matching, and the column of each row."""
    n = len(w_NN)
    values = np.unique(w_NN)
    partner_N = np.empty(n, np.int64)
    least = 0.0  # no matching avoids the best entry of a row or column
    for index in range(n):
        least = max(least, w_NN[index].min(), w_NN[:, index].min())
    low, high = int(np.searchsorted(values, least)), len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _placement_matched(w_NN, values[middle], partner_N):
            high = middle
        else:
            low = middle + 1
    _placement_matched(w_NN, values[low], partner_N)
    column_N = np.empty(n, np.int64)
    for column in range(n):
        column_N[partner_N[column]] = column
    return values[low], column_N
