"""Seconds of a step on emulated links: real messages, codecs, schedules and TCP; compute is slept.

A stage sleeps as long as a stated GPU computes. Between replicas the model is `_SCALE` parameters
and links are as much slower as it is smaller: so the codecs, which here share two cores, take the
part of a step that they would take on as many times more cores.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.harness import environment
from benchmarks.links import ranks as cut_ranks
from benchmarks.links.runners import METHODS as CUT_METHODS
from benchmarks.links.runners import Method
from benchmarks.links.workloads import PaperShape
from benchmarks.replicas import rank as replica_ranks
from benchmarks.time_to_loss.record import record
from benchmarks.time_to_loss.tasks import LAYOUTS, METHODS, LayoutName, Task
from thinpipe.launch.config.boundary import BackwardConfig, ForwardConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.allocator import keep_freed_memory
from thinpipe.launch.host.links import parse_time
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys

_LIMIT_S = 3600.0
_SCALE = 3_200_000
_FORWARD_SHARE = 1 / 3  # of a step's compute
_RARE = ("diloco", "sparse_loco")
_STEPS, _RARE_STEPS = 3, 60
_LONGEST_S = 30.0
"""Steps of replicas that would take longer are not measured: their bytes at the link's rate."""
TORCH = {"torch GPipe fp32": "fp32", "torch GPipe bf16": "bf16", "torch 1F1B bf16": "bf16"}
"""Pipelines of torch itself, and the method of ours whose losses they have."""


def pipelines(
    task: Task,
    methods: Sequence[str],
    *,
    config: RunConfig,
    gpu: str,
    rates: Sequence[float | None],
    delays: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Rows of four stages: first visits, and later ones."""
    torch.set_num_threads(1)  # the ranks are forked from here, and share the cores
    keep_freed_memory()
    chosen = [_cut_method(name) for name in methods]
    stages, compute_s = LAYOUTS["pipeline"].stages, task.compute_s(gpu)
    each_s = compute_s / LAYOUTS["pipeline"].stages / task.microbatches
    with tempfile.TemporaryDirectory() as folder:
        recorded, key = Path(folder) / "visits.pt", Path(folder) / "run.key"
        record(config, recorded)
        keys.new(key)
        shape = PaperShape(
            tokens=task.tokens,
            width=task.width,
            microbatches=task.microbatches,
            samples=task.batch // task.microbatches,
            forward_s=_FORWARD_SHARE * each_s,
            backward_s=(1 - _FORWARD_SHARE) * each_s,
            recorded=recorded,
        )
        for delay in delays:
            plan = cut_ranks.Plan(
                shape, chosen, rates, _STEPS, parse_time(delay), key=key, keep_window=True
            )
            with ShapedNetwork(NetworkSpec.of(stages, delay=delay)) as network:
                limit = partial(cut_ranks.set_rate, network)
                job = partial(cut_ranks.run_host, plan=plan, set_rate=limit)
                found = network.run(job, timeout_s=_LIMIT_S)
            for ranks in zip(*found, strict=True):
                steps_s = [max(times) for times in zip(*(r.steps_s for r in ranks), strict=True)]
                firsts = [rank.first_visit_s for rank in ranks if rank.first_visit_s is not None]
                yield {
                    **_about(task, "pipeline", ranks[0].method, gpu, ranks[0].rate_bps, delay),
                    "first_s": max(firsts, default=median(steps_s)),
                    "later_s": median(steps_s),
                    "bytes": sum(rank.nbytes for rank in ranks),
                }


def replicas(
    task: Task,
    methods: Sequence[str],
    *,
    gpu: str,
    rates: Sequence[float | None],
    delays: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Rows of four replicas; what happens rarely is averaged over its interval."""
    count, scale = LAYOUTS["replicas"].replicas, _SCALE / task.parameters
    compute_s = task.compute_s(gpu) / count
    known: dict[str, int] = {}
    for delay in delays:
        for rate_bps in [None, *filter(None, rates)]:
            often, rare, slow = _divided(methods, known, rate_bps, scale)
            for chosen, steps in ((often, _STEPS), (rare, _RARE_STEPS)):
                if not chosen:
                    continue
                limit = rate_bps and rate_bps * scale
                plan = replica_ranks.Plan(
                    [_exchange_method(name) for name in chosen],
                    [limit],
                    steps,
                    _SCALE,
                    compute_s,
                    replicas=count,
                )
                for name, step_s, nbytes in _exchanged(plan, delay):
                    known.setdefault(name, nbytes)
                    yield {
                        **_about(task, "replicas", name, gpu, rate_bps, delay),
                        **_steps(step_s, nbytes / scale),
                    }
            for name in slow:
                assert rate_bps is not None
                step_s = compute_s + 8 * known[name] / (rate_bps * scale)
                yield {
                    **_about(task, "replicas", name, gpu, rate_bps, delay),
                    **_steps(step_s, known[name] / scale),
                    "computed": True,
                }


def _divided(
    methods: Sequence[str], known: Mapping[str, int], rate_bps: float | None, scale: float
) -> tuple[list[str], list[str], list[str]]:
    """Methods that exchange in every step, rarely, and too much to wait for here."""
    slow = [
        name
        for name in methods
        if rate_bps and 8 * known.get(name, 0) / (rate_bps * scale) > _LONGEST_S
    ]
    others = [name for name in methods if name not in slow]
    rare = [name for name in others if _exchange_method(name).name in _RARE]
    return [name for name in others if name not in rare], rare, slow


def _exchanged(plan: replica_ranks.Plan, delay: str) -> Iterator[tuple[str, float, int]]:
    """Method, seconds of a step, and bytes that a replica sends in it."""
    with ShapedNetwork(NetworkSpec.of(plan.replicas, delay=delay)) as network:
        limit = partial(cut_ranks.set_rate, network)
        job = partial(replica_ranks.run_host, plan=plan, set_rate=limit)
        found = network.run(job, timeout_s=_LIMIT_S)
    for ranks in zip(*found, strict=True):
        steps_s = [max(times) for times in zip(*(r.steps_s for r in ranks), strict=True)]
        typical = fmean(steps_s) if plan.steps >= _RARE_STEPS else median(steps_s)
        yield ranks[0].method, typical, max(rank.sync_nbytes for rank in ranks)


def _about(
    task: Task, layout: LayoutName, method: str, gpu: str, rate_bps: float | None, delay: str
) -> dict[str, Any]:
    return {
        "task": task.name,
        "layout": layout,
        "method": method,
        "gpu": gpu,
        "rate_bps": rate_bps,
        "delay_ms": 1e3 * parse_time(delay),
        "environment": environment(),
    }


def _steps(step_s: float, nbytes: float) -> dict[str, Any]:
    return {"first_s": step_s, "later_s": step_s, "bytes": round(nbytes)}


def _cut_method(name: str) -> Method:
    if name in TORCH:
        return next(method for method in CUT_METHODS if method.name == name)
    (both,) = METHODS["pipeline"][name]["boundary"]
    return Method(
        name,
        "thinpipe",
        "Deep1F1B",
        TypeAdapter[Any](ForwardConfig).validate_python(both["forward"]),
        TypeAdapter[Any](BackwardConfig).validate_python(both["backward"]),
    )


def _exchange_method(name: str) -> replica_ranks.Method:
    how = METHODS["replicas"][name]["gradcomp"]
    return replica_ranks.Method(name, how["method"], dict(how[how["method"]]))
