"""DT-FM, the baseline: its cost of a layout, as published, and its search.

Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous Environments"
(NeurIPS, arXiv 2206.01288), section 3. Devices are partitioned into one group per stage (outer
level); the groups' order and who sends to whom follow exactly (inner level).

    alpha_{d,d'}, beta_{d,d'}   latency_DD (s), rate_DD (bit/s): the mean of both directions
    c_dp, c_pp                  `reduce_DD` (twice the sum of latency and slice), `hop_DD`
    DATAP-COST                  `data_cost`: peers are served one after another
    PIPELINEP-COST              `partition_cost`: bottleneck matchings, then an open path
    total                       DATAP-COST + 2 PIPELINEP-COST, in seconds

The search is a genetic algorithm with a local search (section 3.3; "GCMA"). A pool of random
partitions; a child takes the group of `_COPIED` devices from one parent and the
rest from another; cyclic moves between groups improve it; it replaces the worse parent unless it is
worse than both. A cycle moves one device from group to group until it is back where it began: from
each group the device with the fastest link inside its group, to the group where its mean link is
slowest in comparison, so that fast links are left to the pipelines.

Rewritten from the paper and the behaviour of its code. What differs: draws are seeded (the
released code assigns to `random.seed` instead of calling it), and ties go to the lowest number.

Axes: D devices, S stages, R replicas. The released code fixes the sizes for GPT-3 XL
(`CASE_STUDY`), with a typing error (2024 for 2048) and GiB that are taken for GB; they are kept.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

POOL, CANDIDATES = 100, 5000
"""Of the released code."""
_COPIED = 5
_GIB = 2**30


@dataclass(frozen=True)
class DtfmSizes:
    """Sizes that DT-FM takes from a workload: GB of gradients that a device exchanges, and GB of
    activations that it passes on, in a step.
    """

    stages: int
    replicas: int
    gradient_gb: float
    activation_gb: float

    @classmethod
    def of(cls, work: Workload) -> "DtfmSizes":
        """The gradient that a sharded exchange would need to have as many bytes, and the
        activations of a step, both those of the largest.
        """
        nbytes = max(work.exchange_nbytes, default=0.0) * work.replicas / 2
        cuts = zip(work.activations, work.gradients, strict=True)
        per_microbatch = max(((a.nbytes + g.nbytes) / 2 for a, g in cuts), default=0.0)
        passes = work.microbatches * work.accumulate
        return cls(work.ranks, work.replicas, nbytes / 1e9, per_microbatch * passes / 1e9)


CASE_STUDY = DtfmSizes(8, 8, 1.3 * 4 * 3 / 24, 2024 * 2048 * 2 * (1.25e5 / 2048) / _GIB)
"""The released case study: GPT-3 XL, three layers per stage, 1.25e5 tokens per pipeline."""


@dataclass(frozen=True, eq=False)
class DtfmCost:
    """The costs of pairs of devices, in seconds: `reduce_DD` between replicas, `hop_DD` between
    stages. Layouts are grids [S, R] of devices.
    """

    stages: int
    replicas: int
    reduce_DD: Floats
    hop_DD: Floats

    @classmethod
    def of(cls, cluster: Cluster, sizes: DtfmSizes) -> "DtfmCost":
        """The costs on these devices.

        Raises:
            ValueError: there are fewer devices than stages x replicas.
        """
        if (needed := sizes.stages * sizes.replicas) > cluster.devices:
            raise ValueError(
                f"{sizes.stages} stages x {sizes.replicas} replicas need {needed} devices, the "
                f"network has {cluster.devices}"
            )
        gradient_s = sizes.gradient_gb * 8e9 / sizes.replicas / cluster.rate_DD
        activation_s = sizes.activation_gb * 8e9 / cluster.rate_DD
        reduce_DD = 2 * (cluster.latency_DD + gradient_s)
        hop_DD = cluster.latency_DD + activation_s
        return cls(
            sizes.stages, sizes.replicas, (reduce_DD + reduce_DD.T) / 2, (hop_DD + hop_DD.T) / 2
        )

    def data_cost(self, grid_SR: Ints) -> float:
        """Seconds of the slowest group's exchange."""
        return float(group_costs(self.reduce_DD, grid_SR).max())

    def grid_cost(self, grid_SR: Ints) -> float:
        """Of a layout as it stands: its order of stages, and its replicas."""
        hops_s = self.hop_DD[grid_SR[:-1], grid_SR[1:]].max(axis=1, initial=0.0)
        return self.data_cost(grid_SR) + 2 * float(hops_s.sum())

    def arrange(self, groups_SR: Ints) -> tuple[float, Ints]:
        """The cost of a partition into groups, and its best layout."""
        between_SS = matched_hops(self.hop_DD, groups_SR)
        order_S = open_path(between_SS)
        path_s = float(between_SS[order_S[:-1], order_S[1:]].sum())
        grid_SR = groups_SR[order_S].copy()
        for stage in range(1, self.stages):
            hops_RR = self.hop_DD[np.ix_(grid_SR[stage - 1], grid_SR[stage])]
            _, column_R = bottleneck_matching(hops_RR)
            grid_SR[stage] = grid_SR[stage, column_R]
        return self.data_cost(groups_SR) + 2 * path_s, grid_SR


@compiled
def group_costs(reduce_DD: Floats, grid_SR: Ints) -> Floats:
    """Seconds that each group's slowest member takes to serve its peers."""
    stages, replicas = grid_SR.shape
    found = np.zeros(stages)
    for stage in range(stages):
        for first in range(replicas):
            total = 0.0
            for second in range(replicas):
                if first != second:
                    total += reduce_DD[grid_SR[stage, first], grid_SR[stage, second]]
            found[stage] = max(found[stage], total)
    return found


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
    """The least possible worst cost of a perfect matching, and the column of each row.

    Binary search over the pairs' costs; each threshold is a bipartite matching by augmenting paths
    (Kuhn 1955), O(n^3 log n) for groups of n. DT-FM calls the Hungarian method up to n^2 times.
    """
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


@compiled
def open_path(w_SS: Floats) -> Ints:
    """The cheapest order of all groups, with open ends (Held and Karp 1962, O(2^n n^2))."""
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
    last, visited = np.argmin(best[full]), full  # type: ignore[assignment]  # as numba infers it
    for index in range(n - 1, -1, -1):
        order[index] = last
        last, visited = before[visited, last], visited & ~(1 << last)
    return order


@compiled
def matched_hops(hop_DD: Floats, groups_SR: Ints) -> Floats:
    """[S, S]: the worst hop between two groups when they are matched best."""
    stages, replicas = groups_SR.shape
    between_SS = np.zeros((stages, stages))
    hops_RR = np.empty((replicas, replicas))
    for a in range(stages):
        for b in range(a):
            for i in range(replicas):
                for j in range(replicas):
                    hops_RR[i, j] = hop_DD[groups_SR[a, i], groups_SR[b, j]]
            between_SS[a, b] = between_SS[b, a] = bottleneck_matching(hops_RR)[0]
    return between_SS


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
