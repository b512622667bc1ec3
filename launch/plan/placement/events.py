"""Discrete-event simulation of a step of all replicas, fast enough to score thousands of layouts.

It is the model of `launch/plan/simulate.py` (which see), and gives equal seconds for one pipeline,
with more: several replicas and devices that share their host's uplink and downlink, schedules with
several stages per rank, and the exchange between the replicas of a stage. When a rank has finished
its last backward and sent its gradient it sends to all its peers; when it has received from all, it
begins the next round, for as many rounds as the method has. All messages pass the same uplinks,
links and downlinks.

Neighbouring stages on one device hand tensors over; devices of one host have unlimited links.
Axes: D devices, H hosts, R replicas, P ranks of a pipeline, S stages, C cuts, M microbatches, W
directions (forward, backward), N actions of a rank.
"""

import heapq
from typing import NamedTuple

import numpy as np

from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

FINISH, SEND, DELIVER, ARRIVE, READY, EXCHANGE_DELIVER, EXCHANGE_ARRIVE = range(7)


class Wires(NamedTuple):
    """Rates in bit/s, latencies in seconds."""

    rate_HH: Floats
    latency_HH: Floats
    up_H: Floats
    down_H: Floats


class Step(NamedTuple):
    """What a pass consists of: `seconds_KS` by kind (F, B, I, W) and stage, `order_PN3` the kind,
    stage and microbatch of every action, `nbytes_WC` and `codec_WC2` (encode, decode) of messages,
    and bytes to each peer in a round of the exchange, by rank.
    """

    seconds_KS: Floats
    order_PN3: Ints
    position_S: Ints
    nbytes_WC: Floats
    codec_WC2: Floats
    exchange_P: Floats
    rounds: int
    microbatches: int


def simulate_layout(
    cluster: Cluster, workload: Workload, grid_RP: Ints, *, exchange: bool = True
) -> tuple[float, float]:
    """Seconds until every rank has done its last backward, and until all exchanges are done."""
    return step_of(workload, exchange=exchange)(cluster, grid_RP)


class _Simulated:
    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, cluster: Cluster, grid_RP: Ints) -> tuple[float, float]:
        wires = Wires(cluster.rate_HH, cluster.latency_HH, cluster.up_H, cluster.down_H)
        grid_RP = np.ascontiguousarray(grid_RP)
        host_RP, speed_RP = cluster.host_of_D[grid_RP], cluster.speed_D[grid_RP]
        passed_s, done_s = _placement_events(self._step, wires, grid_RP, host_RP, speed_RP)
        return float(passed_s), float(done_s)


def step_of(workload: Workload, *, exchange: bool = True) -> _Simulated:
    """A function of cluster and layout that simulates a pass, and the exchange if it is wanted."""
    orders = workload.orders
    order_PN3 = np.full((workload.ranks, max(map(len, orders)), 3), -1, np.int64)
    for position, order in enumerate(orders):
        for index, (kind, stage, microbatch) in enumerate(order):
            order_PN3[position, index] = "FBIW".index(kind), stage, microbatch
    forward_S, backward_S = np.array(workload.forward_s), np.array(workload.backward_s)
    messages = (workload.activations, workload.gradients)
    return _Simulated(
        Step(
            np.stack([forward_S, backward_S, backward_S / 2, backward_S / 2]),
            order_PN3,
            np.array(workload.position_of),
            np.array([[m.nbytes for m in way] for way in messages], dtype=np.float64).reshape(
                2, -1
            ),
            np.array([[[m.encode_s, m.decode_s] for m in way] for way in messages]).reshape(
                2, -1, 2
            ),
            np.array(workload.peer_nbytes) * exchange,
            workload.rounds if exchange else 0,
            workload.microbatches,
        )
    )


@compiled
def _placement_pass(wires, links, free_WH, source, target, now_s, nbytes):
    """When the first byte of a message reaches the target's host; `links` holds when each is free.

    `source` and `target` are (host, number of the link's end).
    """
    a, b = source[0], target[0]
    if a == b:
        return now_s
    up_s = max(now_s, free_WH[0, a])
    free_WH[0, a] = up_s + 8 * nbytes / wires.up_H[a]
    link = source[1] << 32 | target[1]
    start_s = max(up_s, links.get(link, 0.0))
    links[link] = start_s + 8 * nbytes / wires.rate_HH[a, b]
    return start_s + wires.latency_HH[a, b]


@compiled
def _placement_take(wires, free_WH, source, target, first_s, nbytes):
    """When the last byte has passed the target's downlink."""
    if source == target:
        return first_s
    free_s = max(first_s, free_WH[1, target]) + 8 * nbytes / wires.down_H[target]
    free_WH[1, target] = free_s
    return max(free_s, first_s + 8 * nbytes / wires.rate_HH[source, target])


@compiled
def _placement_events(step, wires, grid_RP, host_RP, speed_RP):
    replicas, ranks = grid_RP.shape
    stages, microbatches = len(step.position_S), step.microbatches
    queue = [(0.0, 0, 0, 0)]
    queue.pop()
    count = 0
    links = {0: 0.0}
    free_WH = np.zeros((2, len(wires.up_H)))
    next_RP = np.zeros((replicas, ranks), np.int64)
    busy_RP = np.zeros((replicas, ranks), np.bool_)
    ready = np.zeros((replicas, stages, 2, microbatches), np.bool_)
    codec_s = np.zeros((replicas, stages, 2, 2))
    unsent_RP = np.zeros((replicas, ranks), np.int64)
    round_RP = np.full((replicas, ranks), -1, np.int64)
    heard = np.zeros((max(1, step.rounds), replicas, ranks), np.int64)
    passed_s = done_s = 0.0
    for replica in range(replicas):
        for position in range(ranks):
            # the finish of nothing: starts the first action
            count += 1
            heapq.heappush(queue, (0.0, count, -1, replica * ranks + position))
    while queue:
        now_s, _, what, which = heapq.heappop(queue)
        wake_r = wake_p = -1
        if what == -1:
            wake_r, wake_p = which // ranks, which % ranks
        elif what == FINISH:
            wake_r, wake_p = which // ranks, which % ranks
            busy_RP[wake_r, wake_p] = False
            kind, stage, m = step.order_PN3[wake_p, next_RP[wake_r, wake_p]]
            next_RP[wake_r, wake_p] += 1
            passed_s = max(passed_s, now_s)
            way = 0 if kind == 0 else 1
            target = stage + 1 if way == 0 else stage - 1
            if kind != 3 and 0 <= target < stages:
                message = ((wake_r * stages + target) * 2 + way) * microbatches + m
                count += 1
                if step.position_S[target] == wake_p:
                    heapq.heappush(queue, (now_s, count, READY, message))
                else:
                    cut = min(stage, target)
                    begin_s = max(now_s, codec_s[wake_r, stage, way, 0])
                    begin_s += step.codec_WC2[way, cut, 0]
                    codec_s[wake_r, stage, way, 0] = begin_s
                    unsent_RP[wake_r, wake_p] += 1
                    heapq.heappush(queue, (begin_s, count, SEND, message))
        elif what <= READY:
            m = which % microbatches
            way = which // microbatches % 2
            target = which // microbatches // 2 % stages
            replica = which // microbatches // 2 // stages
            stage = target - 1 if way == 0 else target + 1
            cut = min(stage, target)
            here, there = step.position_S[stage], step.position_S[target]
            a, b = host_RP[replica, here], host_RP[replica, there]
            nbytes = step.nbytes_WC[way, cut]
            count += 1
            if what == SEND:
                ends = (a, grid_RP[replica, here]), (b, grid_RP[replica, there])
                first_s = _placement_pass(wires, links, free_WH, ends[0], ends[1], now_s, nbytes)
                heapq.heappush(queue, (first_s, count, DELIVER, which))
                unsent_RP[replica, here] -= 1
                wake_r, wake_p = replica, here
            elif what == DELIVER:
                end_s = _placement_take(wires, free_WH, a, b, now_s, nbytes)
                heapq.heappush(queue, (end_s, count, ARRIVE, which))
            elif what == ARRIVE:
                end_s = max(now_s, codec_s[replica, target, way, 1])
                end_s += step.codec_WC2[way, cut, 1]
                codec_s[replica, target, way, 1] = end_s
                heapq.heappush(queue, (end_s, count, READY, which))
            else:
                ready[replica, target, way, m] = True
                wake_r, wake_p = replica, there
        else:
            second = which % replicas
            first = which // replicas % replicas
            position = which // replicas // replicas % ranks
            number = which // replicas // replicas // ranks
            a, b = host_RP[first, position], host_RP[second, position]
            if what == EXCHANGE_DELIVER:
                nbytes = step.exchange_P[position]
                end_s = _placement_take(wires, free_WH, a, b, now_s, nbytes)
                count += 1
                heapq.heappush(queue, (end_s, count, EXCHANGE_ARRIVE, which))
            else:
                done_s = max(done_s, now_s)
                heard[number, second, position] += 1
                wake_r, wake_p = second, position
        if wake_r < 0 or busy_RP[wake_r, wake_p]:
            continue
        index = next_RP[wake_r, wake_p]
        if index < len(step.order_PN3[wake_p]) and step.order_PN3[wake_p, index, 0] >= 0:
            kind, stage, m = step.order_PN3[wake_p, index]
            way = 0 if kind == 0 else 1
            waits = kind != 3 and (stage > 0 if way == 0 else stage < stages - 1)
            if not waits or ready[wake_r, stage, way, m]:
                busy_RP[wake_r, wake_p] = True
                end_s = now_s + step.seconds_KS[kind, stage] / speed_RP[wake_r, wake_p]
                count += 1
                heapq.heappush(queue, (end_s, count, FINISH, wake_r * ranks + wake_p))
            continue
        if unsent_RP[wake_r, wake_p]:
            continue
        number = round_RP[wake_r, wake_p]
        while number < step.rounds and (
            number < 0 or heard[number, wake_r, wake_p] == replicas - 1
        ):
            number += 1
            round_RP[wake_r, wake_p] = number
            if number == step.rounds or step.exchange_P[wake_p] == 0:
                break
            for ahead in range(1, replicas):
                other = (wake_r + ahead) % replicas
                which = ((number * ranks + wake_p) * replicas + wake_r) * replicas + other
                ends = (
                    (host_RP[wake_r, wake_p], grid_RP[wake_r, wake_p]),
                    (host_RP[other, wake_p], grid_RP[other, wake_p]),
                )
                nbytes = step.exchange_P[wake_p]
                first_s = _placement_pass(wires, links, free_WH, ends[0], ends[1], now_s, nbytes)
                count += 1
                heapq.heappush(queue, (first_s, count, EXCHANGE_DELIVER, which))
    return passed_s, max(passed_s, done_s)
