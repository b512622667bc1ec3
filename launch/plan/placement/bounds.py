"""What no layout can beat: lower bounds, by which a result's gap is known.

DT-FM's cost. Take any threshold t, and call a hop fast if its worst pair costs at most t. Fast hops
in a row make blocks of stages in which every pipeline stays inside one component of the graph of
pairs that cost at most t. So the lengths of the blocks are a partition of S for which

* the components hold R paths for each block: one of c devices holds floor(c / l) of at least l;
* a component of c devices is only in blocks of at most c stages, which must have room for it;
* the group of a stage in a block of l has at most floor(c / l) devices of a component of size c,
  which bounds its exchange from below.

The bound is the least over all such partitions, of the exchange and of hops that cost what the
cheapest fast, and the cheapest slow ones do; then the best over all t. It needs every device to be
in use. Bounds of the predicted step are at `step_bound`.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Host, Ints
from thinpipe.launch.plan.placement.dtfm import DtfmCost
from thinpipe.launch.plan.placement.step import StepModel
from thinpipe.launch.plan.placement.workload import Workload

_THRESHOLDS = 40
_MOST_STAGES = 24
"""Beyond, partitions are too many to list; a single block of all stages bounds them."""


def dtfm_bound(cost: DtfmCost) -> float:
    """A lower bound of DT-FM's cost of any layout that uses all devices; 0 if some are idle."""
    if len(cost.hop_DD) != cost.stages * cost.replicas:
        return 0.0
    pairs = np.unique(cost.hop_DD[~np.eye(len(cost.hop_DD), dtype=bool)])
    if not len(pairs):
        return 0.0
    chosen = np.unique(np.linspace(0, len(pairs) - 1, _THRESHOLDS).round().astype(int))
    return max(_bound_at(cost, pairs, int(index)) for index in chosen)


def _bound_at(cost: DtfmCost, pairs: Floats, index: int) -> float:
    component_D = _components(cost.hop_DD <= pairs[index])
    size_C = np.bincount(component_D)
    fast_s = float(pairs[0])
    slow_s = float(pairs[min(index + 1, len(pairs) - 1)])
    shared = {
        length: _exchange_bounds(cost, component_D, size_C, length)
        for length in range(1, cost.stages + 1)
    }
    best = math.inf
    for blocks in _partitions(cost.stages):
        if not _fits(blocks, size_C, cost.replicas):
            continue
        lengths = sorted(set(blocks))
        exchange_D = np.minimum.reduce([shared[length] for length in lengths])
        hops_s = (cost.stages - len(blocks)) * fast_s + (len(blocks) - 1) * slow_s
        best = min(best, float(exchange_D.max()) + 2 * hops_s)
    return 0.0 if best == math.inf else best


def _partitions(total: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    most = total if most is None else most
    if total == 0:
        yield ()
    elif total > _MOST_STAGES:
        yield (total,)
    for first in range(min(total, most), 0, -1) if total <= _MOST_STAGES else ():
        for rest in _partitions(total - first, first):
            yield (first, *rest)


def _fits(blocks: tuple[int, ...], size_C: Ints, replicas: int) -> bool:
    count = Counter(blocks)
    for length in count:
        paths = replicas * sum(n for other, n in count.items() if other >= length)
        if (size_C // length).sum() < paths:
            return False
    for size in np.unique(size_C):
        small = size_C[size_C <= size].sum()
        if small > replicas * sum(length * n for length, n in count.items() if length <= size):
            return False
    return True


def _exchange_bounds(cost: DtfmCost, component_D: Ints, size_C: Ints, length: int) -> Floats:
    """For each device, the least that peers cost it in a group of a block of that length."""
    most_C = size_C // length
    found = np.full(len(component_D), math.inf)
    for device, own in enumerate(component_D):
        room_C = most_C.copy()
        if room_C[own] == 0:
            continue  # its component is too small for the block
        room_C[own] -= 1
        total, left = 0.0, cost.replicas - 1
        for other in np.argsort(cost.reduce_DD[device], kind="stable"):
            if left and other != device and room_C[component_D[other]]:
                room_C[component_D[other]] -= 1
                total, left = total + float(cost.reduce_DD[device, other]), left - 1
        found[device] = total if left == 0 else math.inf
    return found


def _components(near_DD: np.ndarray) -> Ints:
    component_D = np.full(len(near_DD), -1)
    for first in range(len(near_DD)):
        pending = [first] if component_D[first] < 0 else []
        number = component_D.max() + 1
        while pending:
            device = pending.pop()
            if component_D[device] < 0:
                component_D[device] = number
                pending += np.flatnonzero(near_DD[device] & (component_D < 0)).tolist()
    return component_D


def step_bound(cluster: Cluster, workload: Workload) -> float:
    """No layout's predicted step is shorter than either of these.

    The simulated step if the devices in use were the fastest, all with the best link there is and
    hosts of their own. And a pipeline of such devices but one, which has the speed of the slowest
    that must be in use, in the best place; then an exchange that crosses the least latency at which
    any device has so many neighbours.
    """
    used, latency_s = workload.ranks * workload.replicas, 0.0
    if used == cluster.devices:  # what all agree on crosses the longest way
        latency_s = float(cluster.latency_DD.max())
    speeds = np.sort(cluster.speed_D)[::-1]
    ideal = _ideal(cluster, used, speeds[0])
    everyone = np.arange(used).reshape(workload.replicas, workload.ranks)
    whole = StepModel(ideal, workload)(everyone)
    found = [whole.step_s - whole.latency_s]
    if speeds[used - 1] < speeds[0]:
        exchange_s = 0.0 if workload.overlaps else _exchange_bound(cluster, workload)
        found.append(_slowest_pipeline_s(ideal, workload, speeds[used - 1]) + exchange_s)
    return max(found) + max(latency_s, whole.latency_s)


def _ideal(cluster: Cluster, used: int, speed: float) -> Cluster:
    apart = ~np.eye(cluster.devices, dtype=bool)
    rate = float(cluster.rate_DD[apart].max(initial=0.0)) or math.inf
    latency = float(cluster.latency_DD[apart].min(initial=math.inf))
    rate_HH = np.full((used, used), rate)
    latency_HH = np.full((used, used), latency if latency < math.inf else 0.0)
    np.fill_diagonal(rate_HH, math.inf)
    np.fill_diagonal(latency_HH, 0.0)
    hosts = tuple(Host(f"d{device}", speed=speed) for device in range(used))
    return Cluster(hosts, rate_HH, latency_HH)


def _slowest_pipeline_s(ideal: Cluster, workload: Workload, speed: float) -> float:
    """Seconds of all passes of one pipeline with a slow device where it costs least."""
    alone = replace(workload, replicas=1)
    grid_RP = np.arange(workload.ranks)[None]
    found = []
    for position in range(workload.ranks):
        hosts = list(ideal.hosts[: workload.ranks])
        hosts[position] = replace(hosts[position], speed=speed)
        own = np.ix_(range(workload.ranks), range(workload.ranks))
        cluster = Cluster(tuple(hosts), ideal.rate_HH[own], ideal.latency_HH[own])
        found.append(StepModel(cluster, alone)(grid_RP).passes_s)
    return min(found)


def _exchange_bound(cluster: Cluster, workload: Workload) -> float:
    """Latencies of the rounds of an exchange among that many devices."""
    if not any(workload.peer_nbytes):
        return 0.0
    either_DD = np.minimum(cluster.latency_DD, cluster.latency_DD.T)
    farthest_D = np.sort(either_DD, axis=1)[:, workload.replicas - 1]
    return workload.rounds * float(farthest_D.min())
