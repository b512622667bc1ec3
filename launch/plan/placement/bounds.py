"""A lower bound of the predicted step, over all layouts."""

import math
from dataclasses import replace

import numpy as np

from thinpipe.launch.host.network import Host
from thinpipe.launch.plan.placement.cluster import Cluster, without_own
from thinpipe.launch.plan.placement.step import StepModel
from thinpipe.launch.plan.placement.workload import Workload


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
    rate_HH = without_own(np.full((used, used), rate), math.inf)
    latency = latency if latency < math.inf else 0.0
    latency_HH = without_own(np.full((used, used), latency), 0.0)
    hosts = tuple(Host(name=f"d{device}", speed=float(speed)) for device in range(used))
    return Cluster(hosts, rate_HH, latency_HH)


def _slowest_pipeline_s(ideal: Cluster, workload: Workload, speed: float) -> float:
    """Seconds of all passes of one pipeline with a slow device where it costs least."""
    alone = replace(workload, replicas=1)
    grid_RP = np.arange(workload.ranks)[None]
    found = []
    for position in range(workload.ranks):
        hosts = list(ideal.hosts[: workload.ranks])
        hosts[position] = hosts[position].model_copy(update={"speed": speed})
        own = np.ix_(range(workload.ranks), range(workload.ranks))
        cluster = Cluster(tuple(hosts), ideal.rate_HH[own], ideal.latency_HH[own])
        found.append(StepModel(cluster, alone)(grid_RP).passes_s)
    return min(found)


def _exchange_bound(cluster: Cluster, workload: Workload) -> float:
    if not any(workload.peer_nbytes):
        return 0.0
    either_DD = np.minimum(cluster.latency_DD, cluster.latency_DD.T)
    farthest_D = np.sort(either_DD, axis=1)[:, workload.replicas - 1]
    return workload.rounds * float(farthest_D.min())
