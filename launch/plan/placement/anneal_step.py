"""Annealing of an estimate of the step: swaps of two devices, in about a microsecond each.

Of a pipeline: the first microbatch's way down and up, then a period for each other one, which is
that of the slowest rank, link, uplink, or of the loop that a limited number of microbatches in
flight closes. Of the ranks that exchange: the slowest pair or uplink, once a round. The estimate
chooses; what is reported is simulated (`events.py`). Most swaps leave a maximum as it is: means are
added to maxima. Axes: S stages, P ranks, R replicas, D devices; `place_D` lists devices by place,
rank after rank (P x R), idle ones last.
"""

from typing import NamedTuple

import numpy as np

from thinpipe.launch.memory.microbatches import most_held
from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

SMOOTH = 0.3  # weight of means: few swaps change the maximum, which alone would guide none
_NO_LIMIT = 1 << 40  # more than there are microbatches
_MISFIT_S = 1e9  # added for each device with too little memory


class Devices(NamedTuple):
    """Of a cluster: uplinks and downlinks by device."""

    rate_DD: Floats
    latency_DD: Floats
    up_D: Floats
    down_D: Floats
    speed_D: Floats
    memory_D: Floats


class Plan(NamedTuple):
    """Of a workload: seconds forward and backward by stage (`compute_S2`), bytes and codec seconds
    of each cut and direction, and how many microbatches a stage has in flight.
    """

    compute_S2: Floats
    position_S: Ints
    nbytes_C2: Floats
    codec_C2: Floats
    flight_S: Ints
    need_P: Floats
    peer_P: Floats
    passes: tuple[int, int, int]
    """Microbatches, passes in a step, rounds of the exchange."""
    overlaps: bool
    two_phases: bool
    """All forwards before the first backward, as under GPipe."""


def devices_of(cluster: Cluster) -> Devices:
    """The arrays of a cluster."""
    up_D, down_D = cluster.up_H[cluster.host_of_D], cluster.down_H[cluster.host_of_D]
    own = cluster.speed_D, cluster.memory_D
    return Devices(cluster.rate_DD, cluster.latency_DD, up_D, down_D, *own)


def plan_of(work: Workload) -> Plan:
    """The arrays of a workload."""
    cuts = list(zip(work.activations, work.gradients, strict=True))
    in_flight = [_NO_LIMIT] * work.stages  # where all are under way, or ranks have several stages
    if work.ranks == work.stages:
        held = (most_held(order, stage) for stage, order in enumerate(work.orders))
        in_flight = [most if most < work.microbatches else _NO_LIMIT for most in held]
    return Plan(
        np.array([work.forward_s, work.backward_s]).T.copy(),
        np.array(work.position_of),
        np.array([[down.nbytes, up.nbytes] for down, up in cuts], dtype=np.float64).reshape(-1, 2),
        np.array([[m.encode_s + m.decode_s for m in pair] for pair in cuts]).reshape(-1, 2),
        np.array(in_flight),
        np.array(work.memory or [0.0] * work.ranks),
        np.array(work.peer_nbytes),
        (work.microbatches, work.accumulate, work.rounds),
        work.overlaps,
        work.schedule in ("GPipe", "LoopedBFS"),
    )


@compiled
def _placement_pipeline(devices, plan, place_D, replica, replicas):
    """Estimated seconds of one replica's pass."""
    stages = len(plan.position_S)
    down_s = up_s = slowest_f = slowest_b = slowest = 0.0
    loop_s = 0.0
    ranks = len(plan.need_P)
    busy_P = np.zeros(ranks)
    for stage in range(stages - 1, -1, -1):
        position = plan.position_S[stage]
        device = place_D[position * replicas + replica]
        f = plan.compute_S2[stage, 0] / devices.speed_D[device]
        b = plan.compute_S2[stage, 1] / devices.speed_D[device]
        busy_P[position] += f + b
        slowest_f, slowest_b = max(slowest_f, f), max(slowest_b, b)
        if plan.need_P[position] > devices.memory_D[device]:
            slowest += _MISFIT_S
        if stage < stages - 1:
            below = place_D[plan.position_S[stage + 1] * replicas + replica]
            if below != device:
                sent_s = 8 * plan.nbytes_C2[stage, 0] / devices.rate_DD[device, below]
                back_s = 8 * plan.nbytes_C2[stage, 1] / devices.rate_DD[below, device]
                hop_s = sent_s + devices.latency_DD[device, below] + plan.codec_C2[stage, 0]
                return_s = back_s + devices.latency_DD[below, device] + plan.codec_C2[stage, 1]
                down_s, up_s = down_s + hop_s, up_s + return_s
                loop_s += hop_s + return_s
                slowest_f, slowest_b = max(slowest_f, sent_s), max(slowest_b, back_s)
                uplink_s = 8 * plan.nbytes_C2[stage, 0] / devices.up_D[device]
                if stage > 0:
                    uplink_s += 8 * plan.nbytes_C2[stage - 1, 1] / devices.up_D[device]
                slowest = max(slowest, uplink_s, sent_s, back_s)
        down_s, up_s = down_s + f, up_s + b
        loop_s += f + b
        slowest = max(slowest, loop_s / plan.flight_S[stage])
    for position in range(ranks):
        slowest = max(slowest, busy_P[position])
    more = plan.passes[0] - 1
    if plan.two_phases and stages == ranks:
        return down_s + up_s + more * (slowest_f + slowest_b) + (slowest >= _MISFIT_S) * slowest
    # with several stages per rank the first microbatch's way overlaps with work on others
    return (
        down_s + up_s + more * slowest
        if stages == ranks
        else max(down_s + up_s, (more + 1) * slowest + (down_s + up_s - slowest) * ranks / stages)
    )


@compiled
def _placement_pair(devices, a, b, nbytes):
    forth = devices.latency_DD[a, b] + 8 * nbytes / devices.rate_DD[a, b]
    back = devices.latency_DD[b, a] + 8 * nbytes / devices.rate_DD[b, a]
    return max(forth, back)


@compiled
def _placement_peers(devices, plan, place_D, position, replicas):
    """Seconds of a round of a rank's exchange: the worst pair, or uplink or downlink; the mean."""
    nbytes = plan.peer_P[position]
    if nbytes == 0:
        return 0.0, 0.0
    worst = total = 0.0
    first = position * replicas
    for i in range(first, first + replicas):
        a = place_D[i]
        wire_s = 8 * nbytes * (replicas - 1) / min(devices.up_D[a], devices.down_D[a])
        own = wire_s
        for j in range(first, first + replicas):
            if j != i:
                own = max(own, _placement_pair(devices, a, place_D[j], nbytes))
        total += own
        worst = max(worst, own)
    return worst, total / replicas


@compiled
def _placement_sum(plan, pass_R, peers_P2):
    worst = pass_R.max() * plan.passes[1]
    mean = pass_R.mean() * plan.passes[1]
    round_s, mean_s = 0.0, 0.0
    for position in range(len(peers_P2)):
        round_s = max(round_s, peers_P2[position, 0])
        mean_s += peers_P2[position, 1] / len(peers_P2)
    round_s, mean_s = round_s * plan.passes[2], mean_s * plan.passes[2]
    cost = max(worst, round_s) if plan.overlaps else worst + round_s
    return cost + SMOOTH * (mean + mean_s), cost


@compiled
def _placement_parts(devices, plan, place_D, replicas):
    """Seconds of each replica's pass, and of each rank's exchange."""
    pass_R, peers_P2 = np.zeros(replicas), np.zeros((len(plan.need_P), 2))
    for replica in range(replicas):
        pass_R[replica] = _placement_pipeline(devices, plan, place_D, replica, replicas)
    for position in range(len(plan.need_P)):
        peers_P2[position] = _placement_peers(devices, plan, place_D, position, replicas)
    return pass_R, peers_P2


@compiled
def estimate_step(devices: Devices, plan: Plan, place_D: Ints, replicas: int) -> float:
    """Estimated seconds of the passes and the exchange of a layout."""
    pass_R, peers_P2 = _placement_parts(devices, plan, place_D, replicas)
    return _placement_sum(plan, pass_R, peers_P2)[1]


@compiled
def anneal_step(
    devices: Devices, plan: Plan, start_D: Ints, replicas: int, moves: int, seed: int, heat: float
) -> Ints:
    """The best order of devices among those visited, by the estimate without smoothing.

    The temperature falls from `heat` times the first cost by a factor of 10^4.
    """
    np.random.seed(seed)
    places, place_D = len(plan.need_P) * replicas, start_D.copy()
    pass_R, peers_P2 = _placement_parts(devices, plan, place_D, replicas)
    energy, cost = _placement_sum(plan, pass_R, peers_P2)
    best_D, best = place_D.copy(), cost
    heat *= min(energy, _MISFIT_S / 1e3)
    cooling = 1e-4 ** (1.0 / max(1, moves))
    passes, rounds = np.empty(2), np.empty((2, 2))
    for _ in range(moves):
        heat *= cooling
        first, second = np.random.randint(places), np.random.randint(len(place_D))
        if first == second:
            continue
        place_D[first], place_D[second] = place_D[second], place_D[first]
        for index in range(2):
            place = (first, second)[index]
            if place >= places:
                continue
            position, replica = place // replicas, place % replicas
            passes[index], rounds[index] = pass_R[replica], peers_P2[position]
            pass_R[replica] = _placement_pipeline(devices, plan, place_D, replica, replicas)
            if first // replicas != second // replicas:
                peers_P2[position] = _placement_peers(devices, plan, place_D, position, replicas)
        trial, cost = _placement_sum(plan, pass_R, peers_P2)
        if trial <= energy or np.random.random() < np.exp((energy - trial) / heat):
            energy = trial
            if cost < best - 1e-9 * best:
                best = cost
                best_D[:] = place_D
            continue
        place_D[first], place_D[second] = place_D[second], place_D[first]
        for index in range(1, -1, -1):
            place = (first, second)[index]
            if place < places:
                pass_R[place % replicas] = passes[index]
                peers_P2[place // replicas] = rounds[index]
    return best_D
