"""Layouts with structure to start from: devices that are close together get tiles of the grid.

Devices are clustered (average linkage, by the cost of a hop); a tile of `l` stages x `m` replicas
is then filled with `l m` devices of one cluster. `l = S, m = 1` keeps pipelines inside clusters,
`l = 1, m = R` keeps the exchanges there; between them lie layouts such as the best one of DT-FM's
second network, where the 4 GPUs of a machine make half a pipeline. Axes: D devices.
"""

from collections.abc import Iterator

import numpy as np

from thinpipe.launch.plan.placement.cluster import Floats, Ints
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled


def tiled_layouts(hop_DD: Floats, stages: int, replicas: int, worth_D: Floats) -> Iterator[Ints]:
    """Layouts [S, R] for every size of tile that divides the grid.

    Where there are more devices than places, clusters of devices that are worth more come first.
    """
    merged = cluster_tree(hop_DD)
    for depth in _divisors(stages):
        for width in _divisors(replicas):
            tiles = _tiles(hop_DD, merged, depth * width, worth_D)
            grid_SR = np.empty((stages, replicas), np.int64)
            index = 0
            for stage in range(0, stages, depth):
                for replica in range(0, replicas, width):
                    tile = np.array(tiles[index]).reshape(width, depth).T
                    grid_SR[stage : stage + depth, replica : replica + width] = tile
                    index += 1
            yield grid_SR


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _tiles(hop_DD: Floats, merged: Ints, size: int, worth_D: Floats) -> list[list[int]]:
    """All devices in tiles of that size, of one cluster where that is possible; best tiles first.

    Up the tree, what is left of two clusters is joined.
    """
    count = len(hop_DD)
    rest: list[list[int]] = [[device] for device in range(count)]
    tiles: list[list[int]] = []
    for left, right in merged.tolist():
        joined = [*rest[left], *rest[right]]
        rest[left] = rest[right] = []
        while len(joined) >= size:
            tiles.append(joined[:size])
            joined = joined[size:]
        rest.append(joined)
    if size == 1:
        tiles = [[device] for device in range(count)]

    def quality(tile: list[int]) -> tuple[float, float]:
        return -float(worth_D[tile].min()), float(hop_DD[np.ix_(tile, tile)].max())

    return sorted(tiles, key=quality)


@compiled
def cluster_tree(hop_DD: Floats) -> Ints:
    """[D - 1, 2]: which two nodes are merged, nearest first (average linkage, O(D^2) memory).

    Node D + i is what merge i makes. Every cluster knows its nearest one, so that a merge takes
    O(D) and seldom O(D^2).
    """
    count = len(hop_DD)
    far = hop_DD.copy()
    size = np.ones(count, np.int64)
    node = np.arange(count)
    nearest = np.full(count, -1, np.int64)
    merged = np.empty((max(0, count - 1), 2), np.int64)
    for i in range(count):
        far[i, i] = np.inf
        nearest[i] = np.argmin(far[i])
    for step in range(count - 1):
        a = -1
        for i in range(count):
            if size[i] and (a < 0 or far[i, nearest[i]] < far[a, nearest[a]]):
                a = i
        b = nearest[a]
        merged[step, 0], merged[step, 1] = node[a], node[b]
        for i in range(count):
            if size[i] and i not in (a, b):
                mean = (size[a] * far[a, i] + size[b] * far[b, i]) / (size[a] + size[b])
                far[a, i] = far[i, a] = mean
        size[a] += size[b]
        size[b] = 0
        node[a] = count + step
        far[b, :] = np.inf
        far[:, b] = np.inf
        for i in range(count):
            if size[i] and (i == a or nearest[i] in (a, b)):
                nearest[i] = np.argmin(far[i])
    return merged


def greedy_layout(hop_DD: Floats, stages: int, replicas: int) -> Ints:
    """One pipeline after the other, each stage on the nearest device that is left: a baseline."""
    grid_SR = np.empty((stages, replicas), np.int64)
    left_D = np.ones(len(hop_DD), np.bool_)
    for replica in range(replicas):
        device = int(np.argmax(left_D))
        for stage in range(stages):
            if stage:
                device = int(np.argmin(np.where(left_D, hop_DD[device], np.inf)))
            grid_SR[stage, replica], left_D[device] = device, False
    return grid_SR
