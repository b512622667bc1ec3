"""DT-FM's search: a genetic algorithm with a local search (section 3.3; "GCMA"), the baseline.

A pool of random partitions; a child takes the group of `_COPIED` devices from one parent and the
rest from another; cyclic moves between groups improve it; it replaces the worse parent unless it is
worse than both. A cycle moves one device from group to group until it is back where it began: from
each group the device with the fastest link inside its group, to the group where its mean link is
slowest in comparison, so that fast links are left to the pipelines.

Rewritten from the paper and the behaviour of its code. What differs: draws are seeded (the
released code assigns to `random.seed` instead of calling it), and ties go to the lowest number.
"""

import numpy as np
from numba import njit

from thinpipe.launch.plan.placement.cluster import Floats, Ints
from thinpipe.launch.plan.placement.dtfm import DtfmCost, group_costs, matched_hops, open_path

POOL, CANDIDATES = 100, 5000
"""Of the released code."""
_COPIED = 5


def genetic_search(
    cost: DtfmCost, *, seed: int, candidates: int = CANDIDATES
) -> tuple[Ints, Floats]:
    """The best layout after scoring that many, and the cost of each candidate."""
    devices = np.arange(cost.stages * cost.replicas)
    best, costs = _placement_genetic(
        cost.reduce_DD, cost.hop_DD, devices, cost.stages, seed, POOL, candidates
    )
    groups_SR = np.argsort(best, kind="stable").reshape(cost.stages, cost.replicas)
    return cost.arrange(groups_SR)[1], costs


@njit(error_model="numpy")
def _placement_score(reduce_DD, hop_DD, group_D, stages):
    groups = np.argsort(group_D, kind="mergesort").reshape(stages, len(group_D) // stages)
    between = matched_hops(hop_DD, groups)
    order = open_path(between)
    total = group_costs(reduce_DD, groups).max()
    for index in range(stages - 1):
        total += 2 * between[order[index], order[index + 1]]
    return total


@njit(error_model="numpy")
def _placement_child(first_D, second_D, stages):
    """The second parent with some groups of the first; sizes are made equal again."""
    child = second_D.copy()
    for device in np.random.permutation(len(child))[:_COPIED]:
        child[device] = first_D[device]
    size = np.bincount(child, minlength=stages)
    wanted = len(child) // stages
    for device in np.random.permutation(len(child)):
        if size[child[device]] > wanted:
            target = np.argmin(size)
            size[child[device]] -= 1
            size[target] += 1
            child[device] = target
    return child


@njit(error_model="numpy")
def _placement_gains(hop_DD, group_D, locked_D, group, gain_S):
    """The device of a group to move, -1 if all are locked; fills the gain of each other group."""
    chosen, least = -1, np.inf
    for device in range(len(group_D)):
        if group_D[device] != group or locked_D[device]:
            continue
        fastest = np.inf
        for other in range(len(group_D)):
            if group_D[other] == group and other != device:
                fastest = min(fastest, hop_DD[device, other])
        if fastest < least or chosen < 0:
            chosen, least = device, fastest
    gain_S[:] = 0.0
    if chosen < 0:
        return chosen
    count = np.zeros(len(gain_S))
    for other in range(len(group_D)):
        if other != chosen:
            gain_S[group_D[other]] += hop_DD[chosen, other]
            count[group_D[other]] += 1
    for target in range(len(gain_S)):
        gain_S[target] = gain_S[target] / max(1.0, count[target]) - least
    return chosen


@njit(error_model="numpy")
def _placement_cycle(hop_DD, group_D, locked_D, stages):
    """Move devices along a chain of groups that ends where it began; the sum of the gains."""
    gain_S = np.empty(stages)
    start, highest = -1, -np.inf
    for group in range(stages):
        if _placement_gains(hop_DD, group_D, locked_D, group, gain_S) < 0:
            continue
        for target in range(stages):
            if target != group and gain_S[target] > highest:
                start, highest = group, gain_S[target]
    visited_S = np.zeros(stages, np.bool_)
    total, group = 0.0, start
    while start >= 0:
        device = _placement_gains(hop_DD, group_D, locked_D, group, gain_S)
        visited_S[group] = True
        target = -1
        for other in range(stages):
            allowed = not visited_S[other] or (other == start and group != start)
            if allowed and other != group and (target < 0 or gain_S[other] > gain_S[target]):
                target = other
        if device < 0 or target < 0:
            return -np.inf  # no device may leave: the chain cannot be closed
        total += gain_S[target]
        group_D[device], locked_D[device] = target, True
        group = target
        if group == start:
            return total
    return -np.inf


@njit(error_model="numpy")
def _placement_cycles(hop_DD, group_D, stages):
    """Up to as many cycles as there are groups; those up to the highest total are kept."""
    best = group_D.copy()
    trial = group_D.copy()
    locked_D = np.zeros(len(group_D), np.bool_)
    total = highest = 0.0
    for _ in range(stages):
        total += _placement_cycle(hop_DD, trial, locked_D, stages)
        if total == -np.inf:
            break
        if total > highest:
            highest = total
            best = trial.copy()  # slices would compile numba's errors about shapes, for seconds
    return best


@njit(error_model="numpy")
def _placement_genetic(reduce_DD, hop_DD, devices, stages, seed, pool, candidates):
    np.random.seed(seed)
    members = np.empty((pool, len(devices)), np.int64)
    scores = np.empty(pool)
    costs = np.empty(candidates)
    size = len(devices) // stages
    for index in range(pool):
        order = np.random.permutation(devices)
        for place in range(len(devices)):
            members[index, order[place]] = place // size
        costs[index] = _placement_score(reduce_DD, hop_DD, members[index], stages)
        scores[index] = costs[index]
    for index in range(pool, candidates):
        first, second = np.random.permutation(pool)[:2]
        child = _placement_child(members[first], members[second], stages)
        child = _placement_cycles(hop_DD, child, stages)
        costs[index] = _placement_score(reduce_DD, hop_DD, child, stages)
        worse = first if scores[first] >= scores[second] else second
        if costs[index] <= scores[worse]:
            scores[worse] = costs[index]
            for device in devices:
                members[worse, device] = child[device]
    return members[np.argmin(scores)], costs
