"""Layouts and exchanges small enough to solve by hand; test_simulate.py has single pipelines."""

import dataclasses
import math

import numpy as np
import pytest

from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.network import Host
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.events import Simulation
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.told import ScheduleName


def cluster(rate_bps: list[list[float]], latency_s: float = 0.0, **fields: float) -> Cluster:
    rate_HH = np.array(rate_bps)
    latency_HH = np.full(rate_HH.shape, latency_s)
    np.fill_diagonal(rate_HH, math.inf)
    np.fill_diagonal(latency_HH, 0.0)
    hosts = tuple(Host(name=f"h{index}", **fields) for index in range(len(rate_HH)))  # type: ignore[arg-type]
    return Cluster(hosts, rate_HH, latency_HH)


def workload(stages: int, *, replicas: int = 1, **fields: object) -> Workload:
    plain = Workload(
        replicas=replicas,
        forward_s=(1.0,) * stages,
        backward_s=(2.0,) * stages,
        activations=(Message(0),) * (stages - 1),
        gradients=(Message(0),) * (stages - 1),
        exchange_nbytes=(0.0,) * stages,
        microbatches=4,
        schedule="1F1B",
    )
    return dataclasses.replace(plain, **fields)


def column(devices: int) -> np.ndarray:
    return np.arange(devices)[None]


def test_a_faster_device_computes_in_less_time() -> None:
    work = workload(1)
    slow, fast = (cluster([[1.0]], speed=speed) for speed in (1.0, 2.0))
    assert Simulation(work)(slow, column(1))[0] == 12
    assert Simulation(work)(fast, column(1))[0] == 6


def test_replicas_exchange_in_rounds_after_their_last_backward() -> None:
    work = workload(1, replicas=3, exchange_nbytes=(2e6,), rounds=2)  # 1 MB to each peer a round
    equal = cluster([[8e6] * 3] * 3, 0.5)
    passed_s, done_s = Simulation(work)(equal, np.arange(3)[:, None])
    assert passed_s == 12
    assert done_s == 12 + 2 * (2 * 1.0 + 0.5)  # an uplink carries one message after the other


def test_an_exchange_does_not_hold_up_the_last_gradient() -> None:
    """The last stage is done first, encodes its gradient, and only then begins the exchange."""
    gradient = (Message(10**6, encode_s=0.5),)  # a second
    work = workload(2, replicas=2, gradients=gradient, exchange_nbytes=(0.0, 8e6), microbatches=1)
    equal = cluster([[8e6] * 4] * 4)
    passed_s, done_s = Simulation(work)(equal, np.arange(4).reshape(2, 2))
    assert passed_s == 1 + 1 + 2 + 0.5 + 1 + 2
    assert done_s == 4.5 + 1 + 2 * 4  # the exchange follows on the same uplink


def test_two_devices_of_a_host_share_its_uplink() -> None:
    """Both pipelines cross from the first host to the second: their messages queue up."""
    message = (Message(10**6),)  # a second
    silent = (Message(0),)
    work = workload(2, replicas=2, activations=message, gradients=silent, microbatches=1)
    hosts = (Host(name="a", devices=2), Host(name="b", devices=2))
    shared = Cluster(hosts, np.array([[np.inf, 8e6], [8e6, np.inf]]), np.zeros((2, 2)))
    alone = Simulation(dataclasses.replace(work, replicas=1))(shared, np.array([[0, 2]]))[0]
    both = Simulation(work)(shared, np.array([[0, 2], [1, 3]]))[0]
    assert alone == 6 + 1
    assert both == pytest.approx(6 + 2)


def test_devices_of_a_host_have_unlimited_links() -> None:
    work = workload(2, activations=(Message(10**9),), gradients=(Message(10**9),), microbatches=1)
    one = Cluster((Host(name="a", devices=2),), np.full((1, 1), np.inf), np.zeros((1, 1)))
    assert Simulation(work)(one, column(2))[0] == 6


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_an_interleaved_schedule_has_a_smaller_bubble(schedule: ScheduleName) -> None:
    """Narayanan et al. 2021: with v stages per rank the bubble is 1 / v of the plain one."""
    free = cluster([[8e9] * 2] * 2)
    plain = workload(2, microbatches=4, forward_s=(2.0, 2.0), backward_s=(4.0, 4.0))
    looped = workload(4, microbatches=4, schedule=schedule, ranks_per_pipeline=2)
    busy_s = 4 * 6.0
    assert Simulation(plain)(free, column(2))[0] == busy_s + 6
    assert Simulation(looped)(free, column(2))[0] == busy_s + 3


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_zero_bubble_schedules_run_to_the_end(schedule: ScheduleName) -> None:
    free = cluster([[8e9] * 2] * 2)
    work = workload(4, microbatches=4, schedule=schedule, ranks_per_pipeline=2)
    assert 4 * 6 <= Simulation(work)(free, column(2))[0] <= 4 * 6 + 6


def test_a_thousand_devices_are_simulated() -> None:
    work = workload(8, replicas=125, microbatches=8, exchange_nbytes=(1e3,) * 8)
    many = cluster([[8e6] * 1000] * 1000)
    passed_s, done_s = Simulation(work)(many, np.arange(1000).reshape(125, 8))
    assert done_s > passed_s >= (8 + 7) * 3
