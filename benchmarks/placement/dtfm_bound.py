"""What no layout can beat under DT-FM's cost: a lower bound, by which a result's gap is known.

Take any threshold t, and call a hop fast if its worst pair costs at most t. Fast hops in a row make
blocks of stages in which every pipeline stays inside one component of the graph of pairs that cost
at most t. So the lengths of the blocks are a partition of S for which

* the components hold R paths for each block: one of c devices holds floor(c / l) of at least l;
* a component of c devices is only in blocks of at most c stages, which must have room for it;
* the group of a stage in a block of l has at most floor(c / l) devices of a component of size c,
  which bounds its exchange from below.

The bound is the least over all such partitions, of the exchange and of hops that cost what the
cheapest fast, and the cheapest slow ones do; then the best over all t. It needs every device to be
in use.
"""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from thinpipe.launch.plan.placement.cluster import Floats, Ints
from thinpipe.launch.plan.placement.dtfm import DtfmCost

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
