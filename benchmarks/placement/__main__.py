"""`python -m benchmarks.placement`: layouts of our solver against DT-FM's, random and greedy ones.

`--networks` is a JSON file that maps names to DT-FM's matrices (labels, latency_ms, gbps): what
compression changes in predicted steps of its case study. On a network made here, how time and
quality grow with the number of devices.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Records, Row, command_line, summary
from benchmarks.placement.dtfm_search import CASE_STUDY, DtfmCost, DtfmSizes, genetic_search
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.cluster_files import parse_cluster
from thinpipe.launch.plan.placement.solve import ROUNDS, hop_seconds, solve_step
from thinpipe.launch.plan.placement.starts import greedy_layout
from thinpipe.launch.plan.placement.step import StepModel, step_bound
from thinpipe.launch.plan.placement.workload import Workload

_COMPRESSED = {"uncompressed": (1, 1), "AQ-SGD": (8, 1), "Cocktail": (1, 100), "both": (8, 100)}
_MICROBATCHES = 61
"""Of the case study: 1.25e5 tokens per pipeline, 2048 in each."""
_FORWARD_S, _BACKWARD_S = 0.02, 0.04
_COLUMNS = {
    **dict.fromkeys(("cost s", "DT-FM s", "random s", "greedy s", "bound s"), ".3f"),
    "gap": ".1%",
    "took s": ".1f",
}


def gpt3_step(sizes: DtfmSizes, activations: float, gradients: float) -> Workload:
    """The case study's bytes in microbatches, divided by what compression saves."""
    message = Message(round(sizes.activation_gb * 1e9 / _MICROBATCHES / activations))
    to_peer = 2 * sizes.gradient_gb * 1e9 / sizes.replicas / gradients
    return Workload(
        replicas=sizes.replicas,
        forward_s=(_FORWARD_S,) * sizes.stages,
        backward_s=(_BACKWARD_S,) * sizes.stages,
        activations=(message,) * (sizes.stages - 1),
        gradients=(message,) * (sizes.stages - 1),
        exchange_nbytes=(to_peer,) * sizes.stages,
        microbatches=_MICROBATCHES,
    )


def step_row(name: str, cluster: Cluster, work: Workload, *, rounds: int = ROUNDS) -> Row:
    """One predicted step: ours, DT-FM's layout, random and greedy ones.

    `gap` is how far above the bound, at most, ours is from the best.
    """
    model, shape = StepModel(cluster, work), (work.ranks, work.replicas)
    begin_s = time.perf_counter()
    found = solve_step(cluster, work, rounds=rounds)
    seconds = time.perf_counter() - begin_s
    theirs = None
    if cluster.devices == work.ranks * work.replicas <= 64:
        grid_SR, _ = genetic_search(DtfmCost.of(cluster, DtfmSizes.of(work)), seed=0)
        theirs = model(grid_SR.T).step_s
    draws, used = np.random.default_rng(0), shape[0] * shape[1]
    random = [draws.permutation(cluster.devices)[:used].reshape(shape).T for _ in range(5)]
    greedy = model(greedy_layout(hop_seconds(cluster, work), *shape).T).step_s
    bound = step_bound(cluster, work)
    numbers = {
        "cost s": found.cost,
        "DT-FM s": theirs,
        "random s": float(np.mean([model(grid).step_s for grid in random])),
        "greedy s": greedy,
        "bound s": bound,
        "gap": found.cost / bound - 1,
        "took s": seconds,
    }
    return Row(name, numbers, {"devices": cluster.devices})


def world(devices: int, sites: int, seed: int = 0) -> Cluster:
    """Sites at random places on a square; latency grows with distance, rate falls; each has one of
    three speeds of devices.
    """
    draws = np.random.default_rng(seed)
    place = draws.uniform(0, 1, (sites, 2))
    names = [f"site{number}" for number in range(sites)]
    count = np.full(sites, devices // sites)
    count[: devices % sites] += 1
    links = []
    for a in range(sites):
        for b in range(a):
            distance = float(np.hypot(*(place[a] - place[b])))
            links.append([names[a], names[b], 5 + 120 * distance, 1.2 / (1 + 2 * distance)])
    regions = {
        name: {"hosts": int(count[number]), "speed": float(draws.choice([0.7, 1.0, 1.4]))}
        for number, name in enumerate(names)
    }
    inside = {"latency_ms": 1, "gbps": 5}
    return parse_cluster({"regions": regions, "links": links, "inside": inside})


def scale_rows(sizes: list[int]) -> Iterator[Row]:
    """Time and quality from 8 to 1,000 devices, in sites of about 25."""
    for devices in sizes:
        stages = 4 if devices < 64 else 8
        shape = DtfmSizes(stages, devices // stages, CASE_STUDY.gradient_gb, 0.47)
        cluster = world(devices, max(2, devices // 25))
        work = replace(gpt3_step(shape, 8, 100), microbatches=16)
        for rounds in (2, 8) if devices < 1000 else (1, 2):
            name = f"world, {rounds} rounds"
            yield step_row(name, cluster, work, rounds=rounds)


def main() -> None:
    """Run all parts, print a table, append rows."""
    command = command_line("benchmarks.placement", __doc__)
    command.add_argument("--networks", type=Path, help="JSON: name -> labels, latency_ms, gbps")
    command.add_argument("--devices", type=int, nargs="*", default=[8, 64, 256, 1000])
    options = command.parse_args()
    records, rows = Records(options.json), []
    networks = json.loads(options.networks.read_text(encoding="utf-8")) if options.networks else {}
    clusters = {name: parse_cluster(content) for name, content in networks.items()}

    def every() -> Iterator[Row]:
        for name, cluster in clusters.items():
            for label, saved in _COMPRESSED.items():
                yield step_row(f"{name} {label}", cluster, gpt3_step(CASE_STUDY, *saved))
        yield from scale_rows(options.devices)

    for row in every():
        rows.append(row)
        records.add({}, row)
        print(row, flush=True)
    print(summary(rows, _COLUMNS))


if __name__ == "__main__":
    main()
