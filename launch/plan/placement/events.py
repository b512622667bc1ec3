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

Axes: D devices, H hosts, R replicas, P ranks of a pipeline, L places (R x P), S stages, C cuts, M
microbatches, W directions (forward, backward), X messages (R x S x W x M, by their targets), K
rounds, N actions of a rank, E recorded events.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.told import DIRECTIONS, ComputeEvent, Direction, EventKind

BEGIN, FINISH, SEND, DELIVER, ARRIVE, READY, EXCHANGE_DELIVER, EXCHANGE_ARRIVE = range(8)
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


class Layout(NamedTuple):
    """The device of each place, its host and its speed; places of a replica follow each other."""

    replicas: int
    device_L: Ints
    host_L: Ints
    speed_L: Floats


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


class Simulation:
    """A pass of a workload, and its exchange if that is wanted."""

    def __init__(self, workload: Workload, *, exchange: bool = True) -> None:
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
        device_L = np.ascontiguousarray(grid_RP).ravel()
        on_L = cluster.host_of_D[device_L], cluster.speed_D[device_L]
        layout = Layout(len(grid_RP), device_L, *on_L)
        passed_s, done_s = _placement_events(self._step, wires, layout, log_E7)
        return float(passed_s), float(done_s)


def simulate(workload: Workload, network: Network | None = None) -> SimulatedStep:
    """A pass of one pipeline that begins with all ranks and links idle.

    `network` connects its ranks, in bit/s on the wire; None is unlimited.
    """
    network = network or Network.uniform(workload.ranks)
    return Simulation(workload).recorded(*one_pipeline(workload, network))


def one_pipeline(workload: Workload, network: Network) -> tuple[Cluster, Ints]:
    """The devices and the layout [1, P] of a pipeline with a rank on each host."""
    return Cluster.of(network), np.arange(workload.ranks)[None]


@compiled
def _placement_note(log_E7, kind, place, stage, way, m, start_s, end_s):
    """Record an event, if that is wanted; the first row counts them."""
    if len(log_E7):
        index = int(log_E7[0, 0]) + 1
        log_E7[0, 0] = index
        log_E7[index, 0], log_E7[index, 1], log_E7[index, 2] = kind, place, stage
        log_E7[index, 3], log_E7[index, 4] = way, m
        log_E7[index, 5], log_E7[index, 6] = start_s, end_s


@compiled
def _placement_pass(wires, layout, links, free_WH, ends, now_s, nbytes):
    """When the first byte of a message leaves, and when it reaches the target's host; `links` holds
    when each is free.
    """
    source, target = ends
    a, b = layout.host_L[source], layout.host_L[target]
    if a == b:
        return now_s, now_s
    up_s = max(now_s, free_WH[0, a])
    free_WH[0, a] = up_s + 8 * nbytes / wires.up_H[a]
    link = layout.device_L[source] << 32 | layout.device_L[target]
    start_s = max(up_s, links.get(link, 0.0))
    links[link] = start_s + 8 * nbytes / wires.rate_HH[a, b]
    return start_s, start_s + wires.latency_HH[a, b]


@compiled
def _placement_take(wires, layout, free_WH, source, target, first_s, nbytes):
    """When the last byte has passed the target's downlink."""
    a, b = layout.host_L[source], layout.host_L[target]
    if a == b:
        return first_s
    free_s = max(first_s, free_WH[1, b]) + 8 * nbytes / wires.down_H[b]
    free_WH[1, b] = free_s
    return max(free_s, first_s + 8 * nbytes / wires.rate_HH[a, b])


@compiled
def _placement_next(step, next_L, place):
    """A rank's next action: kind (-1 if there is none), stage, way, its message, and whether it
    waits for that.
    """
    ranks = len(step.order_PN3)
    position, index = place % ranks, next_L[place]
    if index == step.order_PN3.shape[1] or step.order_PN3[position, index, 0] < 0:
        return -1, 0, 0, 0, False
    kind, stage, m = step.order_PN3[position, index]
    stages, way = len(step.position_S), 0 if kind == 0 else 1
    message = ((place // ranks * stages + stage) * 2 + way) * step.microbatches + m
    waits = kind != 3 and (stage > 0 if way == 0 else stage < stages - 1)
    return kind, stage, way, message, waits


@compiled
def _placement_output(step, codec_Z, log_E7, place, action, now_s):
    """What follows an action that is done: when, what and of which message; -1 if nothing does."""
    kind, stage, way, message, _ = action
    target = stage + 1 if way == 0 else stage - 1
    if kind == 3 or not 0 <= target < len(step.position_S):
        return now_s, -1, 0
    own, m = message // step.microbatches, message % step.microbatches
    message += 2 * (target - stage) * step.microbatches
    if step.position_S[target] == place % len(step.order_PN3):
        return now_s, READY, message
    begin_s = max(now_s, codec_Z[0, own])
    end_s = begin_s + step.codec_WC2[way, min(stage, target), 0]
    codec_Z[0, own] = end_s
    _placement_note(log_E7, _ENCODE, place, stage, way, m, begin_s, end_s)
    return end_s, SEND, message


@compiled
def _placement_message(
    step, wires, layout, links, free_WH, codec_Z, left_X, log_E7, what, message, now_s
):
    """A message is sent, delivered, decoded or ready: when, what follows (-1: nothing), and the
    place that may go on (-1: none).
    """
    own, m = message // step.microbatches, message % step.microbatches
    stages, ranks = len(step.position_S), len(step.order_PN3)
    way, target, first = own % 2, own // 2 % stages, own // 2 // stages * ranks
    stage = target - 1 if way == 0 else target + 1
    cut = min(stage, target)
    here, there = first + step.position_S[stage], first + step.position_S[target]
    nbytes = step.nbytes_WC[way, cut]
    if what == SEND:
        ends = here, there
        start_s, first_s = _placement_pass(wires, layout, links, free_WH, ends, now_s, nbytes)
        left_X[message] = start_s
        return first_s, DELIVER, here
    if what == DELIVER:
        end_s = _placement_take(wires, layout, free_WH, here, there, now_s, nbytes)
        _placement_note(log_E7, _TRANSFER, there, cut, way, m, left_X[message], end_s)
        return end_s, ARRIVE, -1
    if what == ARRIVE:
        begin_s = max(now_s, codec_Z[1, own])
        end_s = begin_s + step.codec_WC2[way, cut, 1]
        codec_Z[1, own] = end_s
        _placement_note(log_E7, _DECODE, there, target, way, m, begin_s, end_s)
        return end_s, READY, -1
    return now_s, -1, there


@compiled
def _placement_begin(step, layout, ready_X, idle_L, log_E7, place, action, now_s):
    """When a rank's next action ends, which begins now; -1 if its input is not there yet."""
    kind, stage, way, message, waits = action
    if waits and not ready_X[message]:
        return -1.0
    m = message % step.microbatches
    end_s = now_s + step.seconds_KS[kind, stage] / layout.speed_L[place]
    if waits:
        _placement_note(log_E7, _WAIT, place, stage, way, m, idle_L[place], now_s)
    _placement_note(log_E7, kind, place, stage, way, m, now_s, end_s)
    return end_s


@compiled
def _placement_exchange(
    step, wires, layout, links, free_WH, round_L, heard_KL, queue, count, place, now_s
):
    """Send a rank's part of every round for which it has heard all others; counts the events."""
    replicas, places, ranks = layout.replicas, len(layout.host_L), len(step.order_PN3)
    number, nbytes = round_L[place], step.exchange_P[place % ranks]
    while number < step.rounds and (number < 0 or heard_KL[number, place] == replicas - 1):
        number += 1
        round_L[place] = number
        if number == step.rounds or nbytes == 0:
            break
        for ahead in range(1, replicas):
            other = (place // ranks + ahead) % replicas
            ends = place, other * ranks + place % ranks
            _, first_s = _placement_pass(wires, layout, links, free_WH, ends, now_s, nbytes)
            which = (number * places + place) * replicas + other
            count += 1
            heapq.heappush(queue, (first_s, count, EXCHANGE_DELIVER, which))
    return count


@compiled
def _placement_events(step, wires, layout, log_E7):
    places, ranks, replicas = len(layout.host_L), len(step.order_PN3), layout.replicas
    ends = 2 * replicas * len(step.position_S)
    queue = [(0.0, place - places, BEGIN, place) for place in range(places)]
    links, free_WH, codec_Z = {0: 0.0}, np.zeros((2, len(wires.up_H))), np.zeros((2, ends))
    left_X = np.zeros(ends * step.microbatches)
    ready_X = np.zeros(ends * step.microbatches, np.bool_)
    next_L, unsent_L = np.zeros(places, np.int64), np.zeros(places, np.int64)
    idle_L, busy_L = np.zeros(places), np.ones(places, np.bool_)  # until they may begin
    round_L, heard_KL = np.full(places, -1), np.zeros((max(1, step.rounds), places), np.int64)
    passed_s = done_s = 0.0
    count = 0
    while queue:
        now_s, _, what, which = heapq.heappop(queue)
        then_s, then, place = now_s, -1, which
        if what == BEGIN:
            busy_L[place] = False
        elif what == FINISH:
            action = _placement_next(step, next_L, place)
            next_L[place] += 1
            idle_L[place], busy_L[place], passed_s = now_s, False, max(passed_s, now_s)
            then_s, then, which = _placement_output(step, codec_Z, log_E7, place, action, now_s)
            unsent_L[place] += then == SEND
        elif what <= READY:
            then_s, then, place = _placement_message(
                step, wires, layout, links, free_WH, codec_Z, left_X, log_E7, what, which, now_s
            )
            ready_X[which] = what == READY
            unsent_L[place] -= what == SEND
        else:
            number, source = which // replicas // places, which // replicas % places
            target = which % replicas * ranks + source % ranks
            if what == EXCHANGE_DELIVER:
                nbytes = step.exchange_P[source % ranks]
                then_s = _placement_take(wires, layout, free_WH, source, target, now_s, nbytes)
                then, place = EXCHANGE_ARRIVE, -1
            else:
                done_s, place = max(done_s, now_s), target
                heard_KL[number, target] += 1
        if then >= 0:
            count += 1
            heapq.heappush(queue, (then_s, count, then, which))
        if place < 0 or busy_L[place]:
            continue
        action = _placement_next(step, next_L, place)
        if action[0] >= 0:
            end_s = _placement_begin(step, layout, ready_X, idle_L, log_E7, place, action, now_s)
            if end_s >= 0:
                busy_L[place] = True
                count += 1
                heapq.heappush(queue, (end_s, count, FINISH, place))
        elif not unsent_L[place]:
            count = _placement_exchange(
                step, wires, layout, links, free_WH, round_L, heard_KL, queue, count, place, now_s
            )
    return passed_s, max(passed_s, done_s)
