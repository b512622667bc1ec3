"""The `step` objective: predicted seconds of a step of a layout.

A step is `accumulate` passes, the exchange between replicas after the last one (or during the
passes, for methods that overlap), one latency for what all ranks agree on, and the optimizer. The
passes and the exchange are simulated (`events.py`). An overlapped exchange takes no less
than either, nor less than the busiest host's uplink or downlink takes for both.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.network import Host
from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints, without_own
from thinpipe.launch.plan.placement.events import Simulation
from thinpipe.launch.plan.placement.workload import Workload


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step and of its parts; `limit` says in words what it waits for most."""

    step_s: float
    passes_s: float
    exchange_s: float
    compute_s: float
    optimizer_s: float
    latency_s: float

    @property
    def limit(self) -> str:
        bubble_s = self.passes_s - self.compute_s
        parts = {
            "the compute of the slowest rank": self.compute_s,
            "transfers and the pipeline's bubble": bubble_s,
            "the exchange between replicas": self.exchange_s,
        }
        return max(parts, key=lambda name: parts[name])


class StepModel:
    """Scores layouts [R, P] of one workload on one cluster."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self._cluster, self._workload = cluster, workload
        together = not workload.overlaps
        self._simulated = Simulation(workload, exchange=together)
        self.need = np.array(workload.memory or [0.0] * workload.ranks)
        """Bytes that each rank of a pipeline needs."""
        self._alone = None if together else Simulation(_exchange_only(workload))

    def __call__(self, grid_RP: Ints) -> StepCost:
        """Simulate; infinite if a device has too little memory."""
        work, cluster = self._workload, self._cluster
        if not (self.need <= cluster.memory_D[grid_RP]).all():
            return StepCost(*[math.inf] * 6)
        speed_RP = cluster.speed_D[grid_RP]
        pass_s, done_s = self._simulated(cluster, grid_RP)
        passes_s = work.accumulate * pass_s
        exchange_s = done_s - pass_s
        busy_s = passes_s + exchange_s
        if self._alone is not None:
            _, exchange_s = self._alone(cluster, grid_RP)
            busy_s = max(passes_s, exchange_s, self._wires_s(grid_RP))
        optimizer_s = float((np.array(work.by_rank(work.optimizer_s)) / speed_RP).max())
        used = grid_RP.ravel()
        latency_s = float(cluster.latency_DD[np.ix_(used, used)].max())
        compute_P = np.array(work.microbatch_s) * work.microbatches * work.accumulate
        compute_s = float((compute_P / speed_RP).max())
        step_s = busy_s + latency_s + optimizer_s
        return StepCost(step_s, passes_s, exchange_s, compute_s, optimizer_s, latency_s)

    def _wires_s(self, grid_RP: Ints) -> float:
        """Seconds that the busiest uplink or downlink needs for a step's messages."""
        sent_HH = link_nbytes(self._cluster, self._workload, grid_RP)
        up_s = 8 * sent_HH.sum(axis=1) / self._cluster.up_H
        down_s = 8 * sent_HH.sum(axis=0) / self._cluster.down_H
        return float(max(up_s.max(), down_s.max()))


def link_nbytes(cluster: Cluster, work: Workload, grid_RP: Ints) -> Floats:
    """[H, H]: bytes that each link between hosts carries in a step."""
    sent_HH = np.zeros((len(cluster.hosts), len(cluster.hosts)))
    host_RP, passes = cluster.host_of_D[grid_RP], work.microbatches * work.accumulate
    for cut, (down, up) in enumerate(zip(work.activations, work.gradients, strict=True)):
        above_R = host_RP[:, work.position_of[cut]]
        below_R = host_RP[:, work.position_of[cut + 1]]
        np.add.at(sent_HH, (above_R, below_R), passes * down.nbytes)
        np.add.at(sent_HH, (below_R, above_R), passes * up.nbytes)
    for position, nbytes in enumerate(work.peer_nbytes):
        group_R = host_RP[:, position]
        np.add.at(sent_HH, (group_R[:, None], group_R[None]), nbytes * work.rounds)
    np.fill_diagonal(sent_HH, 0.0)
    return sent_HH


def _exchange_only(work: Workload) -> Workload:
    """The same exchange of ranks that compute and pass on nothing; one stage is one rank."""
    idle = (0.0,) * work.ranks
    silent = (Message(0),) * (work.ranks - 1)
    return Workload(
        replicas=work.replicas,
        forward_s=idle,
        backward_s=idle,
        activations=silent,
        gradients=silent,
        exchange_nbytes=work.by_rank(work.exchange_nbytes),
        microbatches=1,
        schedule="GPipe",
        rounds=work.rounds,
    )


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
    latency = float(cluster.latency_DD[apart].min()) if apart.any() else 0.0
    hosts = tuple(Host(name=f"d{device}", speed=float(speed)) for device in range(used))
    rate_HH, latency_HH = (np.full((used, used), x) for x in (rate, latency))
    return Cluster(hosts, without_own(rate_HH, math.inf), without_own(latency_HH, 0.0))


def _slowest_pipeline_s(ideal: Cluster, workload: Workload, speed: float) -> float:
    """Seconds of all passes of one pipeline with a slow device where it costs least."""
    alone, ranks = replace(workload, replicas=1), workload.ranks
    own = np.ix_(range(ranks), range(ranks))  # copies: kernels are compiled anew for views
    rate_HH, latency_HH = ideal.rate_HH[own], ideal.latency_HH[own]
    found = []
    for position in range(ranks):
        hosts = list(ideal.hosts[:ranks])
        hosts[position] = hosts[position].model_copy(update={"speed": speed})
        cluster = Cluster(tuple(hosts), rate_HH, latency_HH)
        found.append(StepModel(cluster, alone)(np.arange(ranks)[None]).passes_s)
    return min(found)


def _exchange_bound(cluster: Cluster, workload: Workload) -> float:
    if not any(workload.peer_nbytes):
        return 0.0
    either_DD = np.minimum(cluster.latency_DD, cluster.latency_DD.T)
    farthest_D = np.sort(either_DD, axis=1)[:, workload.replicas - 1]
    return workload.rounds * float(farthest_D.min())
