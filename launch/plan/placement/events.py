"""Discrete-event simulation of a step of all replicas, fast enough to score thousands of layouts.

It models the best that the schedule can do: a rank starts its next action as soon as the input has
arrived. Encoding and decoding overlap with that, on one thread for each direction of each cut, one
message after the other. A message is sent as soon as it is encoded. It passes its sender's uplink,
the link, and its receiver's downlink, each first in first out; a stage in the middle sends
activations and gradients through the same uplink, as do all devices of a host.

So seconds are a lower bound to compare measured steps with: they contain pipeline bubbles,
transfers and codecs, but no copies, wake-ups, protocol headers or contention for cores, and
decoding may run ahead of the schedule without limit.

When a rank has finished its last backward and sent its gradient it sends to its replicas; when it
has received from all, it begins the next round, for as many rounds as the method has. All messages
pass the same uplinks, links and downlinks. Neighbouring stages on one device hand tensors over;
devices of one host have unlimited links.

Axes: D devices, H hosts, R replicas, P ranks of a pipeline, S stages, C cuts, M microbatches, W
directions (forward, backward), N actions of a rank, E recorded events.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.told import DIRECTIONS, ComputeEvent, Direction, EventKind

FINISH, SEND, DELIVER, ARRIVE, READY, EXCHANGE_DELIVER, EXCHANGE_ARRIVE = range(7)
_KINDS: tuple[EventKind, ...] = ("F", "B", "B", "W", "wait", "encode", "decode")
"""Of recorded events; a backward of the input alone is called B too. Then come transfers."""
_WAIT, _ENCODE, _DECODE, _TRANSFER = range(4, 8)


@dataclass(frozen=True)
class TransferEvent:
    """The transfer of a message, in seconds since the step began.

    `start_s` is when its first byte leaves, `end_s` when its last one arrives. `cut` is the stage
    before the cut.
    """

    cut: int
    direction: Direction
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated pass, with events of the same kinds as a measured step."""

    step_s: float
    events: tuple[ComputeEvent, ...]
    transfers: tuple[TransferEvent, ...]


class Wires(NamedTuple):
    """Rates in bit/s, latencies in seconds."""

    rate_HH: Floats
    latency_HH: Floats
    up_H: Floats
    down_H: Floats


class Step(NamedTuple):
    """What a pass consists of: `seconds_KS` by kind (F, B, I, W) and stage, `order_PN3` the kind,
    stage and microbatch of every action, `nbytes_WC` and `codec_WC2` (encode, decode) of messages,
    bytes to each peer in a round of the exchange, by rank, and when ranks may begin.
    """

    seconds_KS: Floats
    order_PN3: Ints
    position_S: Ints
    nbytes_WC: Floats
    codec_WC2: Floats
    exchange_P: Floats
    ready_P: Floats
    rounds: int
    microbatches: int


class Simulation:
    """A pass of a workload, and its exchange if that is wanted; ranks may begin when `ready_s`."""

    def __init__(
        self, workload: Workload, *, exchange: bool = True, ready_s: Sequence[float] = ()
    ) -> None:
        orders = workload.orders
        order_PN3 = np.full((workload.ranks, max(map(len, orders)), 3), -1, np.int64)
        for position, order in enumerate(orders):
            for index, (kind, stage, microbatch) in enumerate(order):
                order_PN3[position, index] = "FBIW".index(kind), stage, microbatch
        forward_S, backward_S = np.array(workload.forward_s), np.array(workload.backward_s)
        ways = (workload.activations, workload.gradients)
        nbytes = np.array([[m.nbytes for m in way] for way in ways], dtype=np.float64)
        codec = np.array([[[m.encode_s, m.decode_s] for m in way] for way in ways])
        self._step = Step(
            np.stack([forward_S, backward_S, backward_S / 2, backward_S / 2]),
            order_PN3,
            np.array(workload.position_of),
            nbytes.reshape(2, -1),
            codec.reshape(2, -1, 2),
            np.array(workload.peer_nbytes) * exchange,
            np.array(ready_s or [0.0] * workload.ranks),
            workload.rounds,
            workload.microbatches,
        )

    def __call__(self, cluster: Cluster, grid_RP: Ints) -> tuple[float, float]:
        """Seconds until every rank has done its last backward, and until all exchanges are done."""
        return self._run(cluster, grid_RP, np.empty((0, 7)))

    def recorded(self, cluster: Cluster, grid_RP: Ints) -> SimulatedStep:
        """The same with everything that happens in the pass."""
        step = self._step
        messages = step.nbytes_WC.size * step.microbatches
        most = len(grid_RP) * (2 * step.order_PN3[..., 0].size + 3 * messages)
        log_E7 = np.zeros((1 + most, 7))
        passed_s, _ = self._run(cluster, grid_RP, log_E7)
        events, transfers = [], []
        for code, rank, stage, way, m, start_s, end_s in log_E7[1 : 1 + int(log_E7[0, 0])].tolist():
            if code == _TRANSFER:
                cut, direction = int(stage), DIRECTIONS[int(way)]
                transfers.append(TransferEvent(cut, direction, int(m), start_s, end_s))
            elif end_s > start_s:
                kind = _KINDS[int(code)]
                events.append(ComputeEvent(int(stage), kind, int(m), start_s, end_s, int(rank)))
        events.sort(key=lambda event: (event.rank, event.start_s))
        return SimulatedStep(passed_s, tuple(events), tuple(transfers))

    def _run(self, cluster: Cluster, grid_RP: Ints, log_E7: Floats) -> tuple[float, float]:
        wires = Wires(cluster.rate_HH, cluster.latency_HH, cluster.up_H, cluster.down_H)
        grid_RP = np.ascontiguousarray(grid_RP)
        host_RP, speed_RP = cluster.host_of_D[grid_RP], cluster.speed_D[grid_RP]
        passed_s, done_s = _placement_events(self._step, wires, grid_RP, host_RP, speed_RP, log_E7)
        return float(passed_s), float(done_s)


def simulate(
    workload: Workload, network: Network | None = None, *, ready_s: Sequence[float] = ()
) -> SimulatedStep:
    """A pass of one pipeline that begins with all ranks and links idle.

    `network` connects its ranks, in bit/s on the wire; None is unlimited.

    Raises:
        ValueError: the network has another number of hosts.
    """
    network = network or Network.uniform(workload.ranks)
    return Simulation(workload, ready_s=ready_s).recorded(*one_pipeline(workload, network))


def one_pipeline(workload: Workload, network: Network) -> tuple[Cluster, Ints]:
    """The devices and the layout [1, P] of a pipeline with a rank on each host.

    Raises:
        ValueError: the network has another number of hosts.
    """
    if network.hosts != workload.ranks:
        raise ValueError(
            f"network has {network.hosts} hosts for {workload.ranks} ranks: pass one for each "
            "(Network.for_ranks)"
        )
    return Cluster.of(network), np.arange(workload.ranks)[None]


@compiled
def _placement_note(log_E7, kind, rank, stage, way, m, start_s, end_s):
    """Record an event, if that is wanted; the first row counts them."""
    if len(log_E7):
        index = int(log_E7[0, 0]) + 1
        log_E7[0, 0] = index
        log_E7[index, 0], log_E7[index, 1], log_E7[index, 2] = kind, rank, stage
        log_E7[index, 3], log_E7[index, 4] = way, m
        log_E7[index, 5], log_E7[index, 6] = start_s, end_s


@compiled
def _placement_pass(wires, links, free_WH, source, target, now_s, nbytes):
    """When the first byte of a message leaves, and when it reaches the target's host; `links` holds
    when each is free.

    `source` and `target` are (host, number of the link's end).
    """
    a, b = source[0], target[0]
    if a == b:
        return now_s, now_s
    up_s = max(now_s, free_WH[0, a])
    free_WH[0, a] = up_s + 8 * nbytes / wires.up_H[a]
    link = source[1] << 32 | target[1]
    start_s = max(up_s, links.get(link, 0.0))
    links[link] = start_s + 8 * nbytes / wires.rate_HH[a, b]
    return start_s, start_s + wires.latency_HH[a, b]


@compiled
def _placement_take(wires, free_WH, source, target, first_s, nbytes):
    """When the last byte has passed the target's downlink."""
    if source == target:
        return first_s
    free_s = max(first_s, free_WH[1, target]) + 8 * nbytes / wires.down_H[target]
    free_WH[1, target] = free_s
    return max(free_s, first_s + 8 * nbytes / wires.rate_HH[source, target])


@compiled
def _placement_events(step, wires, grid_RP, host_RP, speed_RP, log_E7):
    replicas, ranks = grid_RP.shape
    stages, microbatches = len(step.position_S), step.microbatches
    queue = [(0.0, 0, 0, 0)]
    queue.pop()
    count = 0
    links = {0: 0.0}
    free_WH = np.zeros((2, len(wires.up_H)))
    next_RP = np.zeros((replicas, ranks), np.int64)
    busy_RP = np.ones((replicas, ranks), np.bool_)  # until they may begin
    idle_s = np.zeros((replicas, ranks))
    left_s = np.zeros((replicas, stages, 2, microbatches))
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
            ready_s = step.ready_P[position]
            heapq.heappush(queue, (ready_s, count, -1, replica * ranks + position))
    while queue:
        now_s, _, what, which = heapq.heappop(queue)
        wake_r = wake_p = -1
        if what == -1:
            wake_r, wake_p = which // ranks, which % ranks
            busy_RP[wake_r, wake_p] = False
        elif what == FINISH:
            wake_r, wake_p = which // ranks, which % ranks
            busy_RP[wake_r, wake_p] = False
            kind, stage, m = step.order_PN3[wake_p, next_RP[wake_r, wake_p]]
            next_RP[wake_r, wake_p] += 1
            idle_s[wake_r, wake_p] = now_s
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
                    end_s = begin_s + step.codec_WC2[way, cut, 0]
                    codec_s[wake_r, stage, way, 0] = end_s
                    _placement_note(log_E7, _ENCODE, which, stage, way, m, begin_s, end_s)
                    unsent_RP[wake_r, wake_p] += 1
                    heapq.heappush(queue, (end_s, count, SEND, message))
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
                start_s, first_s = _placement_pass(
                    wires, links, free_WH, ends[0], ends[1], now_s, nbytes
                )
                left_s[replica, target, way, m] = start_s
                heapq.heappush(queue, (first_s, count, DELIVER, which))
                unsent_RP[replica, here] -= 1
                wake_r, wake_p = replica, here
            elif what == DELIVER:
                end_s = _placement_take(wires, free_WH, a, b, now_s, nbytes)
                start_s, rank = left_s[replica, target, way, m], replica * ranks + there
                _placement_note(log_E7, _TRANSFER, rank, cut, way, m, start_s, end_s)
                heapq.heappush(queue, (end_s, count, ARRIVE, which))
            elif what == ARRIVE:
                begin_s = max(now_s, codec_s[replica, target, way, 1])
                end_s = begin_s + step.codec_WC2[way, cut, 1]
                codec_s[replica, target, way, 1] = end_s
                rank = replica * ranks + there
                _placement_note(log_E7, _DECODE, rank, target, way, m, begin_s, end_s)
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
                rank = wake_r * ranks + wake_p
                if waits:
                    idle = idle_s[wake_r, wake_p]
                    _placement_note(log_E7, _WAIT, rank, stage, way, m, idle, now_s)
                _placement_note(log_E7, kind, rank, stage, way, m, now_s, end_s)
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
                _, first_s = _placement_pass(wires, links, free_WH, ends[0], ends[1], now_s, nbytes)
                count += 1
                heapq.heappush(queue, (first_s, count, EXCHANGE_DELIVER, which))
    return passed_s, max(passed_s, done_s)
