"""Our solver: structured starts, annealing, then single swaps on the simulated step.

A round anneals one start, or the best layout so far, and searches on from what comes out by single
swaps on the simulation. Rounds depend on the seed and their number alone. So a result is the same
wherever `rounds` ends the search; `seconds` ends it at a round that depends on the machine, and the
result is then what that many rounds give anywhere.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from thinpipe.launch.plan.placement.anneal_step import (
    anneal_step,
    devices_of,
    estimate_step,
    plan_of,
)
from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.starts import greedy_layout, tiled_layouts
from thinpipe.launch.plan.placement.step import StepModel
from thinpipe.launch.plan.placement.workload import Workload

ROUNDS = 8  # four times what benchmarks/results/placement_cpu_202611.md took, which had two
_MOVES_PER_DEVICE = 3000  # of a round
_MOST_MOVES = 600_000  # from 200 devices on, so that time grows no further
_PAIRS = 300_000_000
"""Pairs of replicas that a round may look at: a swap changes two groups that exchange."""
_ACTIONS = 500_000  # simulated actions of a round's single swaps
_MOST_SIMULATIONS = 400  # of a round; small pipelines would take more of them
_SIMULATED_HEAT = 0.05  # of single swaps at first, as a share of the step
_POOR = 1.5  # swaps whose estimate exceeds the present step by this factor are not simulated
_KEPT = 5  # starts that are annealed, the best first
_SIMULATED_STARTS = 12  # of lowest estimates: a simulation takes far longer than an estimate
_HEATS = (0.003, 0.003, 0.1)  # of rounds in turn; the first of them begin with the best layout


@dataclass(frozen=True, eq=False)
class Placement:
    """A layout: the device of each replica and rank, what it costs, and after how many rounds."""

    grid_RP: Ints
    cost: float
    rounds: int


def solve_step(
    cluster: Cluster,
    workload: Workload,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    seconds: float | None = None,
) -> Placement:
    """The layout of the shortest predicted step on a cluster with enough devices.

    Raises:
        ValueError: no layout is found in which all stages fit their devices' memory.
    """
    replicas, ranks = workload.replicas, workload.ranks
    model = StepModel(cluster, workload)
    _check_memory(cluster, model.need, replicas)
    devices, plan = devices_of(cluster), plan_of(workload)
    used = ranks * replicas

    def grid(place_D: Ints) -> Ints:
        return place_D[:used].reshape(ranks, replicas).T

    def estimated(place_D: Ints) -> float:
        return estimate_step(devices, plan, place_D, replicas)

    def refined(place_D: Ints, draw: int) -> tuple[float, Ints]:
        return _refined(model, grid, estimated, place_D, np.random.default_rng(draw), tries)

    actions = replicas * sum(map(len, workload.orders)) + replicas * used * workload.rounds
    tries = min(_MOST_SIMULATIONS, _ACTIONS // actions)
    likely = sorted(_starts(cluster, workload, seed), key=estimated)[:_SIMULATED_STARTS]
    starts = sorted(likely, key=lambda place_D: model(grid(place_D)).step_s)
    moves = max(1000, min(_MOST_MOVES, _MOVES_PER_DEVICE * cluster.devices, _PAIRS // replicas**2))
    begin_s, done = time.perf_counter(), 0
    best, best_D = refined(starts[0], seed)
    while done < rounds if seconds is None else time.perf_counter() - begin_s < seconds:
        done += 1
        draw = (seed * 1_000_003 + done * 7919) % 2**31
        turn = done % len(_HEATS)
        start_D = starts[min((done - 1) % _KEPT, len(starts) - 1)] if turn else best_D
        place_D = anneal_step(devices, plan, start_D, replicas, moves, draw, _HEATS[turn])
        cost, place_D = refined(place_D, draw)
        if cost < best:
            best, best_D = cost, place_D
    if best == np.inf:
        raise ValueError(
            f"no layout was found in which all {ranks} x {replicas} stages fit their devices' "
            "memory; use more stages, fewer microbatches in flight or smaller batches"
        )
    return Placement(grid(best_D).copy(), best, done)


def _refined(
    model: StepModel,
    grid: Callable[[Ints], Ints],
    estimated: Callable[[Ints], float],
    place_D: Ints,
    draws: np.random.Generator,
    count: int,
) -> tuple[float, Ints]:
    """Anneal single swaps on the simulated step; those of poor estimates are not simulated."""
    now_s = best_s = model(grid(place_D)).step_s
    best_D = place_D
    used, devices = grid(place_D).size, len(place_D)
    for left in range(count, 0, -1):
        first, second = draws.integers(used), draws.integers(devices)
        heat = _SIMULATED_HEAT * now_s * (left / count) ** 2
        trial_D = place_D.copy()
        trial_D[[first, second]] = place_D[[second, first]]
        if first == second or estimated(trial_D) > _POOR * now_s:
            continue
        step_s = model(grid(trial_D)).step_s
        if step_s <= now_s or draws.random() < np.exp((now_s - step_s) / heat):
            place_D, now_s = trial_D, step_s
        if step_s < best_s:
            best_s, best_D = step_s, trial_D
    return best_s, best_D


def _starts(cluster: Cluster, workload: Workload, seed: int) -> Iterator[Ints]:
    """Structured layouts and random ones. Equal costs are told apart by a shuffled numbering."""
    shape, hop_DD = (workload.ranks, workload.replicas), hop_seconds(cluster, workload)
    draws = np.random.default_rng(seed)
    shuffled_D = draws.permutation(cluster.devices)
    shuffled_DD = hop_DD[np.ix_(shuffled_D, shuffled_D)]
    worth_D = np.minimum(cluster.speed_D, 1e6)[shuffled_D]
    for grid_SR in tiled_layouts(shuffled_DD, *shape, worth_D):
        yield _places(shuffled_D[grid_SR], cluster.devices)
    for _ in range(2):
        yield draws.permutation(cluster.devices)
    yield _places(greedy_layout(hop_DD, *shape), cluster.devices)


def _places(grid_SR: Ints, devices: int) -> Ints:
    idle = np.setdiff1d(np.arange(devices), grid_SR)
    return np.concatenate([grid_SR.ravel(), idle])


def hop_seconds(cluster: Cluster, workload: Workload) -> Floats:
    """Seconds of a microbatch between two devices, the mean of both directions."""
    nbytes = max((m.nbytes for m in workload.activations), default=0)
    hop_DD = cluster.latency_DD + 8 * max(nbytes, 1) / cluster.rate_DD
    return (hop_DD + hop_DD.T) / 2


def _check_memory(cluster: Cluster, need_P: Floats, replicas: int) -> None:
    room_D = np.sort(cluster.memory_D)[::-1]
    for index, position in enumerate(np.argsort(need_P)[::-1]):
        needed = (index + 1) * replicas
        if room_D[needed - 1] < need_P[position]:
            fitting = int((room_D >= need_P[position]).sum())
            raise ValueError(
                f"stage {position} needs {need_P[position] / 1e9:.3g} GB and only {fitting} of "
                f"{cluster.devices} devices have that, for {needed} places; use more stages, fewer "
                "microbatches in flight, smaller batches or devices with more memory"
            )
