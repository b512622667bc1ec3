"""Seconds of a step on emulated links: real messages, codecs, schedules and TCP; compute is slept.

A stage sleeps as long as a stated GPU computes. All hosts share this machine's cores, and so do
their codecs. So stages of a pipeline can be `dilation` times slower, and links with them: codecs
then take as much of a step as on that many times more cores. Replicas have a smaller model, of
`_MODEL_PARAMETERS`, and links and buckets smaller by the same factor (42 for SmolLM2).
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.harness import Row
from benchmarks.links import ranks as cut_ranks
from benchmarks.links.runners import METHODS as CUT_METHODS
from benchmarks.links.runners import Method
from benchmarks.links.workloads import PaperShape
from benchmarks.replicas import rank as replica_ranks
from benchmarks.shards import speed
from benchmarks.time_to_loss.record import record
from benchmarks.time_to_loss.tasks import LAYOUTS, METHODS, LayoutName, Task
from thinpipe.gradcomp.registry import load_method
from thinpipe.launch.config.boundary import BackwardConfig, ForwardConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.allocator import keep_freed_memory
from thinpipe.launch.host.links import parse_time
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys
from thinpipe.pipeline.models.transformer import TransformerConfig

_LIMIT_S = 3600.0
_MODEL_PARAMETERS = 3_200_000
_BUCKET_MB = 25.0  # the default of all methods that have buckets
_FORWARD_SHARE = 1 / 3  # of a step's compute
_EXCHANGE_RARELY, _INTERVAL = ("diloco", "sparse_loco"), 30
_STEPS, _RARE_STEPS = 3, 60
_LONGEST_S = 30.0
"""Steps of replicas that would take longer are not measured: their bytes at the link's rate."""
_DDP = {"torch DDP fp32": "fp32", "torch DDP bf16": "bf16"}
TORCH: dict[LayoutName, dict[str, str]] = {
    "pipeline": {"torch GPipe fp32": "fp32", "torch GPipe bf16": "bf16", "torch 1F1B bf16": "bf16"},
    "replicas": _DDP,
    "8 replicas": _DDP,
    "shards": {"torch FSDP2 fp32": "fp32", "torch FSDP2 bf16": "bf16"},
}
"""What torch has itself, and the method of ours whose losses it has."""
_SHARDS = {
    "fp32": "fsdp 32",
    "bf16": "fsdp 16",
    "QSDP W8G8": "qsdp W8G8 shift",
    "QSDP W4G4 differences": "qsdp W4G4 differences",
    "torch FSDP2 fp32": "torch fp32",
    "torch FSDP2 bf16": "torch bf16",
}
"""Their names in `benchmarks/shards/speed.py`."""
_SHORT = 8
"""Tokens per sample that shards really compute: bytes do not depend on them."""


@dataclass(frozen=True)
class Conditions:
    """The GPU that is slept for, and links: bit/s (None: no limit) and one-way delays."""

    gpu: str
    rates: Sequence[float | None]
    delays: Sequence[str]


def pipelines(
    task: Task,
    methods: Sequence[str],
    under: Conditions,
    *,
    config: RunConfig,
    recorded: Path,
    dilation: float,
) -> Iterator[dict[str, Any]]:
    """Rows of four stages: first visits, and later ones. `recorded` is made if it is new."""
    stages = LAYOUTS["pipeline"].stages
    shape = _slept(task, "pipeline", under.gpu, config, recorded, dilation)
    chosen = [_cut_method("pipeline", name) for name in methods]
    rate_of = {rate and rate / dilation: rate for rate in under.rates}
    for delay in under.delays:
        delay_s = dilation * parse_time(delay)
        for ranks in _sent(cut_ranks.Plan(shape, chosen, [*rate_of], _STEPS, delay_s), stages):
            steps_s = [max(times) for times in zip(*(r.steps_s for r in ranks), strict=True)]
            firsts = [rank.first_visit_s for rank in ranks if rank.first_visit_s is not None]
            about = (ranks[0].method, under.gpu, rate_of[ranks[0].rate_bps], delay)
            yield {
                **_about(task, "pipeline", *about),
                "first_s": max(firsts, default=median(steps_s)) / dilation,
                "later_s": median(steps_s) / dilation,
                "dilation": dilation,
                "bytes": sum(rank.nbytes for rank in ranks),
            }


def _slept(
    task: Task, layout: LayoutName, gpu: str, config: RunConfig, recorded: Path, dilation: float
) -> PaperShape:
    """Stages of the layout; `recorded` is made if it is new."""
    how = LAYOUTS[layout]
    if not recorded.exists():
        record(config.with_train(batch_size=task.batch // how.replicas), recorded)
    torch.set_num_threads(1)  # the ranks are forked from here, and share the cores
    keep_freed_memory()
    each_s = dilation * task.compute_s(gpu) / how.stages / how.replicas / task.microbatches
    return PaperShape(
        tokens=task.tokens,
        width=task.width,
        microbatches=task.microbatches,
        samples=task.batch // how.replicas // task.microbatches,
        forward_s=_FORWARD_SHARE * each_s,
        backward_s=(1 - _FORWARD_SHARE) * each_s,
        recorded=recorded,
    )


def _sent(plan: cut_ranks.Plan, stages: int) -> Iterator[tuple[cut_ranks.RankResult, ...]]:
    """What all ranks measured, by rate and method."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ShapedNetwork(NetworkSpec.of(stages, delay=f"{plan.delay_s}s")) as network,
    ):
        key = Path(folder) / "run.key"
        keys.new(key)
        whole = replace(plan, key=key, keep_window=True)
        limit = partial(cut_ranks.set_rate, network)
        job = partial(cut_ranks.run_host, plan=whole, set_rate=limit)
        yield from zip(*network.run(job, timeout_s=_LIMIT_S), strict=True)


def replicas(
    task: Task, methods: Sequence[str], under: Conditions, layout: LayoutName = "replicas"
) -> Iterator[dict[str, Any]]:
    """Rows of a layout's replicas; what happens rarely is averaged over its interval."""
    count, scale = LAYOUTS[layout].replicas, _MODEL_PARAMETERS / task.parameters
    compute_s = task.compute_s(under.gpu) / count
    keep_freed_memory()
    known: dict[str, int] = {}
    for delay, rate_bps in product(under.delays, [None, *filter(None, under.rates)]):
        limit = rate_bps and rate_bps * scale
        often, rare, slow = _divided(layout, methods, known, limit)
        for chosen, steps in ((often, _STEPS), (rare, _RARE_STEPS)):
            how = [_scaled(_exchange_method(layout, name), scale) for name in chosen]
            plan = replica_ranks.Plan(
                how, [limit], steps, _MODEL_PARAMETERS, compute_s, replicas=count
            )
            for name, step_s, nbytes in _exchanged(plan, delay) if chosen else ():
                known.setdefault(name, nbytes)
                about = _about(task, layout, name, under.gpu, rate_bps, delay)
                yield {**about, **_steps(step_s, nbytes / scale)}
        for name in slow:
            assert limit is not None
            width = 2 if name == "torch DDP bf16" else 4  # of a value in a bucket
            buckets = math.ceil(width * task.parameters / (1e6 * _BUCKET_MB))
            around_s = 2 * (count - 1) * buckets * parse_time(delay)  # of a ring
            step_s = compute_s + 8 * known[name] / limit + around_s
            about = _about(task, layout, name, under.gpu, rate_bps, delay)
            yield {**about, **_steps(step_s, known[name] / scale), "computed": True}


def both(
    task: Task,
    methods: Sequence[str],
    under: Conditions,
    *,
    config: RunConfig,
    recorded: Path,
    dilation: float,
) -> Iterator[dict[str, Any]]:
    """Rows of pipelines that are replicas, in full size; as `pipelines`. All visits are first ones:
    of a run of one epoch.
    """
    shape, how = _slept(task, "both", under.gpu, config, recorded, dilation), LAYOUTS["both"]
    known, free_s = dict[str, int](), dict[str, float]()
    for delay, rate_bps in product(under.delays, [None, *filter(None, under.rates)]):
        often, rare, slow = _divided(
            "both", methods, known, limit := rate_bps and rate_bps / dilation
        )
        for chosen, steps in ((often, _STEPS), (rare, _RARE_STEPS)):
            plan = replica_ranks.Plan(
                [replace(_exchange_method("both", n), cuts=_cut_method("both", n)) for n in chosen],
                *([limit], steps, task.parameters // how.stages, 0.0, shape),
                replicas=how.replicas,
                stages=how.stages,
                new_samples=True,
            )
            slower = f"{dilation * parse_time(delay)}s"
            for name, step_s, nbytes in _exchanged(plan, slower) if chosen else ():
                known.setdefault(name, nbytes)
                free_s.setdefault(name, step_s)
                about = _about(task, "both", name, under.gpu, rate_bps, delay)
                yield {**about, **_steps(step_s / dilation, nbytes), "dilation": dilation}
        for name in slow:
            assert limit is not None
            step_s = (free_s[name] + 8 * known[name] / limit) / dilation
            about = _about(task, "both", name, under.gpu, rate_bps, delay)
            yield {**about, **_steps(step_s, known[name]), "dilation": dilation, "computed": True}


def shards(task: Task, methods: Sequence[str], under: Conditions) -> Iterator[dict[str, Any]]:
    """Rows of four shards in full size, whose ranks compute `_SHORT` tokens and sleep the rest."""
    count = LAYOUTS["shards"].shards
    model = TransformerConfig(**{**task.model, "context": _SHORT})
    labels = {_SHARDS[name]: name for name in methods}
    compute_s = task.compute_s(under.gpu) / count
    keep_freed_memory()
    for delay in under.delays:
        plan = speed.Plan(model, 1, tuple(under.rates), _STEPS, 1, tuple(labels), compute_s)
        with ShapedNetwork(NetworkSpec.of(count, delay=delay)) as network:
            limit = partial(cut_ranks.set_rate, network)
            job = partial(speed.run_host, plan=plan, shape=limit)
            rows: list[Row] = network.run(job, timeout_s=_LIMIT_S)[0]
        for row in rows:
            step_s, mb = row.numbers["step s"], row.numbers["MB a host"]
            rate_bps = row.detail["rate_bps"]
            about = _about(task, "shards", labels[row.method], under.gpu, rate_bps, delay)
            yield {**about, **_steps(step_s or 0.0, 1e6 * (mb or 0.0))}


def _divided(
    layout: LayoutName, methods: Sequence[str], known: Mapping[str, int], limit: float | None
) -> tuple[list[str], list[str], list[str]]:
    """Methods that exchange in every step, rarely, and too much to wait for here."""
    rare = [name for name in methods if _exchange_method(layout, name).name in _EXCHANGE_RARELY]
    slow = [
        name
        for name in methods
        for at_once in [known.get(name, 0) * (_INTERVAL if name in rare else 1)]
        if limit and 8 * at_once / limit > _LONGEST_S
    ]
    left = [name for name in methods if name not in slow]
    return [n for n in left if n not in rare], [n for n in left if n in rare], slow


def _exchanged(plan: replica_ranks.Plan, delay: str) -> Iterator[tuple[str, float, int]]:
    """Method, seconds of a step, and bytes that a rank sends in it."""
    with ShapedNetwork(NetworkSpec.of(plan.replicas * plan.pipeline_ranks, delay=delay)) as network:
        limit = partial(cut_ranks.set_rate, network)
        job = partial(replica_ranks.run_host, plan=plan, set_rate=limit)
        found = network.run(job, timeout_s=_LIMIT_S)
    for ranks in zip(*found, strict=True):
        steps_s = [max(times) for times in zip(*(r.steps_s for r in ranks), strict=True)]
        typical = fmean(steps_s) if plan.steps >= _RARE_STEPS else median(steps_s)
        yield ranks[0].method, typical, max(rank.sync_nbytes + rank.cut_nbytes for rank in ranks)


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
    }


def _steps(step_s: float, nbytes: float) -> dict[str, Any]:
    return {"first_s": step_s, "later_s": step_s, "bytes": round(nbytes)}


def _cut_method(layout: LayoutName, name: str) -> Method:
    if name in TORCH["pipeline"]:
        return next(method for method in CUT_METHODS if method.name == name)
    (both,) = METHODS[layout][name]["boundary"]
    return Method(
        name,
        "thinpipe",
        "Deep1F1B",
        TypeAdapter[Any](ForwardConfig).validate_python(both["forward"]),
        TypeAdapter[Any](BackwardConfig).validate_python(both["backward"]),
    )


def _scaled(method: replica_ranks.Method, scale: float) -> replica_ranks.Method:
    """With buckets that are as much smaller as the model is."""
    if method.name == replica_ranks.DDP:
        return replace(method, options={**method.options, "mb": _BUCKET_MB * scale})
    if "bucket_mb" not in load_method(method.name).Config.model_fields:
        return method
    mb = method.options.get("bucket_mb", _BUCKET_MB)
    return replace(method, options={**method.options, "bucket_mb": mb * scale})


def _exchange_method(layout: LayoutName, name: str) -> replica_ranks.Method:
    if name in _DDP:
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        return replica_ranks.Method(name, replica_ranks.DDP, {"dtype": dtype})
    how = METHODS[layout][name]["gradcomp"]
    return replica_ranks.Method(name, how["method"], dict(how[how["method"]]))
