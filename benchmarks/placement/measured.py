"""`python -m benchmarks.placement.measured`: predicted and measured steps of three layouts.

Eight emulated hosts in three sites (`thinpipe shaped`), four stages and two replicas: schedule,
codecs, messages, exchanges and links are real, compute is slept. On each network and under each
compression a random layout, the one of DT-FM's search and ours are predicted and run.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import (
    PREDICTED,
    Records,
    Row,
    command_line,
    prediction_numbers,
    summary,
)
from benchmarks.links.ranks import keep_windows
from benchmarks.links.runners import METHODS as CUTS
from benchmarks.links.workloads import PaperShape
from benchmarks.placement.dtfm_search import DtfmCost, DtfmSizes, genetic_search
from benchmarks.replicas.rank import Method, Plan, RankResult, run_host
from thinpipe.launch.cuts.message_cost import measure_message
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.lab.names import host_address
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.memory.exchange import measure_exchange
from thinpipe.launch.plan.placement.cluster import Cluster, Ints
from thinpipe.launch.plan.placement.cluster_files import parse_cluster
from thinpipe.launch.plan.placement.solve import solve_step
from thinpipe.launch.plan.placement.step import StepModel
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.wire.told import BACKWARD, FORWARD

_LIMIT_S = 600.0
_STAGES, _REPLICAS = 4, 2
_BY_NAME = {cuts.name: cuts for cuts in CUTS}
_COCKTAIL = {"subset": 0.1, "topk": 0.2, "bits": 4}

METHODS = (
    Method("bf16, fp32 all-reduce", "allreduce", {}, _BY_NAME["bf16"]),
    Method("AQ-SGD 3/6, fp32 all-reduce", "allreduce", {}, _BY_NAME["aqsgd fw3/bw6"]),
    Method("AQ-SGD 3/6, Cocktail", "cocktail", _COCKTAIL, _BY_NAME["aqsgd fw3/bw6"]),
)

NETWORKS: dict[str, dict[str, Any]] = {
    "two labs and a home": {
        "regions": {"east": 3, "west": 3, "home": 2},
        "inside": {"latency_ms": 1, "gbps": 0.04},
        "links": [
            ["east", "west", 20, 0.01],
            ["east", "home", 15, 0.006],
            ["west", "home", 35, 0.004],
        ],
    },
    "slow uplinks": {
        "regions": {"lab": 4, "flat": 2, "house": 2},
        "inside": {"latency_ms": 1, "gbps": 0.02},
        "links": [
            ["lab", "flat", 10, 0.016, 0.003],
            ["lab", "house", 25, 0.012, 0.004],
            ["flat", "house", 30, 0.003, 0.003],
        ],
    },
    "unequal machines": {
        "regions": {
            "fast": {"hosts": 3, "speed": 1.5},
            "plain": {"hosts": 3, "speed": 1.0},
            "old": {"hosts": 2, "speed": 0.6},
        },
        "inside": {"latency_ms": 2, "gbps": 0.02},
        "links": [
            ["fast", "plain", 40, 0.008],
            ["fast", "old", 10, 0.004],
            ["plain", "old", 60, 0.012],
        ],
    },
}
"""Slow on purpose: with delays, packets of all links pass one process of the emulator, which all
eight hosts together can keep busy at a few hundred Mbit/s. Messages and models are as small.
"""


def workload(shape: PaperShape, parameters: int, method: Method) -> Workload:
    """What `thinpipe plan` would count of such a run: real messages and exchanges."""
    assert method.cuts is not None
    sides = ((method.cuts.forward, FORWARD), (method.cuts.backward, BACKWARD))
    down, up = (measure_message(spec, shape.boundary, way) for spec, way in sides)
    exchange = measure_exchange(method.name, method.options, _REPLICAS)
    return Workload(
        replicas=_REPLICAS,
        forward_s=(shape.forward_s,) * _STAGES,
        backward_s=(shape.backward_s,) * _STAGES,
        activations=(down,) * (_STAGES - 1),
        gradients=(up,) * (_STAGES - 1),
        exchange_nbytes=(exchange.nbytes / (_REPLICAS - 1) * parameters,) * _STAGES,
        microbatches=shape.microbatches,
        rounds=exchange.rounds,
        overlaps=exchange.overlaps,
    )


def layouts(cluster: Cluster, work: Workload, seed: int) -> dict[str, Ints]:
    """[R, P] of each."""
    shape = (_REPLICAS, _STAGES)
    theirs_SR, _ = genetic_search(DtfmCost.of(cluster, DtfmSizes.of(work)), seed=seed)
    return {
        "random": np.random.default_rng(seed).permutation(cluster.devices).reshape(shape),
        "DT-FM": theirs_SR.T,
        "ours": solve_step(cluster, work, seed=seed).grid_RP,
    }


def network_of(cluster: Cluster) -> NetworkSpec:
    """The same links for emulated hosts: rates on the wire, up- and downlinks of each host."""
    apart = [(int(a), int(b)) for a, b in np.argwhere(~np.eye(cluster.devices, dtype=bool))]
    wire_HH = cluster.rate_HH / PAYLOAD_SHARE
    return NetworkSpec(
        cluster.devices,
        tuple((cluster.up_H / PAYLOAD_SHARE).tolist()),
        tuple((cluster.down_H / PAYLOAD_SHARE).tolist()),
        {pair: float(wire_HH[pair]) for pair in apart},
        {pair: float(cluster.latency_HH[pair]) for pair in apart},
    )


def measure(cluster: Cluster, grid_RP: Ints, plan: Plan) -> tuple[float, ...]:
    """Seconds of every step, of the slowest rank."""
    with ShapedNetwork(network_of(cluster)) as network:
        job = partial(_host, grid_RP=grid_RP, speeds=cluster.speed_D.tolist(), plan=plan)
        ranks: list[list[RankResult]] = network.run(job, timeout_s=_LIMIT_S)
    return tuple(max(step) for step in zip(*(rank[0].steps_s for rank in ranks), strict=True))


def _host(host: int, grid_RP: Ints, speeds: Sequence[float], plan: Plan) -> list[RankResult]:
    keep_windows()
    assert plan.shape is not None
    os.environ["RANK"] = str(int(np.flatnonzero(grid_RP.ravel() == host)[0]))
    os.environ["MASTER_ADDR"] = host_address(int(grid_RP[0, 0]))
    own = replace(
        plan.shape,
        forward_s=plan.shape.forward_s / speeds[host],
        backward_s=plan.shape.backward_s / speeds[host],
    )
    return run_host(host, replace(plan, shape=own))


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Every network, compression and layout; predicted only without `--steps`."""
    shape = PaperShape(tokens=options.tokens, microbatches=options.microbatches)
    for name in options.networks:
        cluster = parse_cluster(NETWORKS[name])
        for method in METHODS:
            work = workload(shape, options.parameters, method)
            model = StepModel(cluster, work)
            plan = Plan(
                [method], [None], options.steps, options.parameters, 0.0, shape, _REPLICAS, _STAGES
            )
            for layout, grid_RP in layouts(cluster, work, options.seed).items():
                steps_s = measure(cluster, grid_RP, plan) if options.steps else ()
                yield Row(
                    layout,
                    prediction_numbers(model(grid_RP).step_s, steps_s),
                    {"network": name, "compression": method.label},
                    options.seed,
                    {"grid": grid_RP.tolist(), "steps_s": steps_s, "load": os.getloadavg()[0]},
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure, print."""
    command = command_line("benchmarks.placement.measured", __doc__)
    command.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    command.add_argument("--steps", type=int, default=5, help="measured steps; 0: predict only")
    command.add_argument("--tokens", type=int, default=64)
    command.add_argument("--microbatches", type=int, default=8)
    command.add_argument("--parameters", type=int, default=400_000, help="of a stage")
    command.add_argument("--seed", type=int, default=0)
    options = command.parse_args(arguments)
    torch.set_num_threads(1)  # the ranks are forked from here, and share the cores
    records, found = Records(options.json), list[Row]()
    for row in rows(options):
        found.append(row)
        records.add({}, row)
        print(row, flush=True)
    print(summary(found, PREDICTED))


if __name__ == "__main__":
    main()
