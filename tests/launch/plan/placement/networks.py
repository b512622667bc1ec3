"""Small random clusters and workloads."""

import math

import numpy as np

from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.network import Host
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.workload import Workload


def random_cluster(
    devices: int, seed: int, *, symmetric: bool = True, speeds: bool = False
) -> Cluster:
    """Sites of random sizes, with fast links inside."""
    draws = np.random.default_rng(seed)
    site_D = draws.integers(0, 3, devices)
    inside_DD = site_D[:, None] == site_D[None]
    rate_DD = np.where(inside_DD, 2e9, draws.uniform(1e8, 1e9, (devices, devices)))
    latency_DD = np.where(inside_DD, 1e-3, draws.uniform(0.01, 0.2, (devices, devices)))
    if symmetric:
        rate_DD, latency_DD = np.maximum(rate_DD, rate_DD.T), np.maximum(latency_DD, latency_DD.T)
    np.fill_diagonal(rate_DD, math.inf)
    np.fill_diagonal(latency_DD, 0.0)
    speed_D = draws.uniform(0.5, 2.0, devices) if speeds else np.ones(devices)
    hosts = tuple(
        Host(name=f"h{index}", site=f"site{site_D[index]}", speed=float(speed_D[index]))
        for index in range(devices)
    )
    return Cluster(hosts, rate_DD, latency_DD)


def small_workload(stages: int, replicas: int, seed: int, *, overlaps: bool = False) -> Workload:
    """Compute, transfers and exchange take about as long as each other."""
    draws = np.random.default_rng(seed)
    message = Message(int(draws.integers(10**5, 10**7)), 0.01, 0.01)
    return Workload(
        replicas=replicas,
        forward_s=tuple(draws.uniform(0.05, 0.1, stages)),
        backward_s=tuple(draws.uniform(0.1, 0.2, stages)),
        activations=(message,) * (stages - 1),
        gradients=(message,) * (stages - 1),
        exchange_nbytes=(float(draws.integers(10**6, 10**8)),) * stages,
        microbatches=int(draws.integers(1, 6)),
        schedule="1F1B",
        overlaps=overlaps,
        optimizer_s=(0.01,) * stages,
    )
