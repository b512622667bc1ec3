"""Annealing of DT-FM's cost: swaps of two devices in the grid, on a smoothed cost.

The cost is a maximum of maxima, so most swaps leave it as it is: means are added to the maxima, and
every layout that is better than the last ones is scored exactly in the end. Axes: S stages, R
replicas, K hops; `place_D` lists devices by place, stage after stage, idle ones last.
"""

import numpy as np

from thinpipe.launch.plan.placement.cluster import Floats, Ints
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

SMOOTH = 0.7
"""Weight of the means."""


@compiled
def _placement_hop(hop_DD, place_D, stage, replicas, hops_K2):
    worst = total = 0.0
    for replica in range(stage * replicas, (stage + 1) * replicas):
        cost = hop_DD[place_D[replica], place_D[replica + replicas]]
        total += cost
        worst = max(worst, cost)
    hops_K2[stage, 0], hops_K2[stage, 1] = worst, total / replicas


@compiled
def _placement_group(sum_D, stage, replicas, group_S2):
    worst = total = 0.0
    for place in range(stage * replicas, (stage + 1) * replicas):
        total += sum_D[place]
        worst = max(worst, sum_D[place])
    group_S2[stage, 0], group_S2[stage, 1] = worst, total / replicas


@compiled
def _placement_exchange(reduce_DD, place_D, sum_D, first, second, replicas):
    """Swap two places; `sum_D` holds, by place, what each device's peers cost it."""
    a, b = place_D[first], place_D[second]
    s, t = first // replicas, second // replicas
    if s != t:
        sum_a = sum_b = 0.0
        for place in range(s * replicas, (s + 1) * replicas):
            if place != first:
                other = place_D[place]
                sum_D[place] += reduce_DD[other, b] - reduce_DD[other, a]
                sum_b += reduce_DD[other, b]
        if (t + 1) * replicas <= len(sum_D):
            for place in range(t * replicas, (t + 1) * replicas):
                if place != second:
                    other = place_D[place]
                    sum_D[place] += reduce_DD[other, a] - reduce_DD[other, b]
                    sum_a += reduce_DD[other, a]
            sum_D[second] = sum_a
        sum_D[first] = sum_b
    else:
        sum_D[first], sum_D[second] = sum_D[second], sum_D[first]
    place_D[first], place_D[second] = b, a


@compiled
def _placement_refresh(hop_DD, place_D, sum_D, place, shape, hops_K2, group_S2):
    stages, replicas = shape
    stage = place // replicas
    if stage >= stages:
        return
    _placement_group(sum_D, stage, replicas, group_S2)
    if stage > 0:
        _placement_hop(hop_DD, place_D, stage - 1, replicas, hops_K2)
    if stage < stages - 1:
        _placement_hop(hop_DD, place_D, stage, replicas, hops_K2)


@compiled
def _placement_smoothed(hops_K2, group_S2):
    worst = total = hops = means = 0.0
    for stage in range(len(group_S2)):
        worst = max(worst, group_S2[stage, 0])
        total += group_S2[stage, 1]
    for hop in range(len(hops_K2)):
        hops += hops_K2[hop, 0]
        means += hops_K2[hop, 1]
    return worst + 2 * hops + SMOOTH * (total / len(group_S2) + 2 * means), worst + 2 * hops


@compiled
def anneal_dtfm(  # a kernel's arguments are flat
    reduce_DD: Floats,
    hop_DD: Floats,
    start_D: Ints,
    shape: tuple[int, int],
    moves: int,
    seed: int,
    heat: float,
) -> Ints:
    """The best order of devices among those visited, by the cost without smoothing.

    The temperature falls from `heat` times the first cost by a factor of 10^4.
    """
    np.random.seed(seed)
    stages, replicas = shape
    places = stages * replicas
    place_D = start_D.copy()
    sum_D = np.zeros(places)
    hops_K2, group_S2 = np.zeros((stages - 1, 2)), np.zeros((stages, 2))
    for place in range(places):
        first = place // replicas * replicas
        for other in range(first, first + replicas):
            if other != place:
                sum_D[place] += reduce_DD[place_D[place], place_D[other]]
    for stage in range(stages):
        _placement_refresh(hop_DD, place_D, sum_D, stage * replicas, shape, hops_K2, group_S2)
    energy, cost = _placement_smoothed(hops_K2, group_S2)
    best_D, best = place_D.copy(), cost
    heat *= max(energy, 1e-12)
    cooling = 1e-4 ** (1.0 / max(1, moves))
    for _ in range(moves):
        heat *= cooling
        first, second = np.random.randint(places), np.random.randint(len(place_D))
        if first == second:
            continue
        _placement_exchange(reduce_DD, place_D, sum_D, first, second, replicas)
        for place in (first, second):
            _placement_refresh(hop_DD, place_D, sum_D, place, shape, hops_K2, group_S2)
        trial, cost = _placement_smoothed(hops_K2, group_S2)
        if trial <= energy or np.random.random() < np.exp((energy - trial) / heat):
            energy = trial
            if cost < best - 1e-9 * best:
                best = cost
                best_D[:] = place_D
            continue
        _placement_exchange(reduce_DD, place_D, sum_D, first, second, replicas)
        for place in (first, second):
            _placement_refresh(hop_DD, place_D, sum_D, place, shape, hops_K2, group_S2)
    return best_D
