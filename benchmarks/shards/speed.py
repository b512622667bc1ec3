"""Step time of a stage held by several hosts, on shaped links, against torch's own FSDP2 over gloo.

    python -m benchmarks.shards.speed --rates 100mbit 1gbit --shards 2 --json out.jsonl
    python -m benchmarks.shards.speed --rates 100mbit --shards 4 --ranks-per-site 2

With `--ranks-per-site` that many ranks are processes of one host, and share its link. A step is a
forward and a backward of transformer blocks, and AdamW. torch's FSDP2 gathers weights once per step
too (`reshard_after_forward=False`). "bound" is the time that a host's bytes take on its link, or
the step without a limit if that is longer. Where both are measured, losses of 32 bits are compared
with torch's: of a wrong implementation nothing is reported.
"""

import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.harness import Records, Row, command_line, summary
from benchmarks.links.ranks import SetRate, default_group, set_rate, when_all_arrived
from benchmarks.replicas.rank import sent_nbytes
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.stage import ShardedStage, StageShards
from thinpipe.launch.host.links import format_rate, parse_rate
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.models.transformer import TransformerConfig, TransformerStage, build_layers

_TIMEOUT_S = 600.0
_ALL_S = 3600.0
"""A rank may wait for another one for the first, and everything may take the second."""

OURS: dict[str, ShardsConfig] = {
    "fsdp 32": ShardsConfig(),
    "fsdp 16": ShardsConfig(weight_bits=16, gradient_bits=16),
    "qsdp W8G8": ShardsConfig(method="qsdp", weight_rounding="stochastic"),
    "qsdp W8G8 shift": ShardsConfig(method="qsdp"),
    "qsdp W6G4": ShardsConfig(method="qsdp", weight_bits=6, gradient_bits=4),
    "qsdp W4G4 differences": ShardsConfig(
        method="qsdp", weights="differences", weight_bits=4, gradient_bits=4
    ),
    "qsdp W4G4 differences, zstd": ShardsConfig(
        method="qsdp", weights="differences", weight_bits=4, gradient_bits=4, coding="zstd"
    ),
}
TORCHS: dict[str, torch.dtype | None] = {"torch fp32": None, "torch bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """What all ranks measure, in this order: every method at every rate, that many steps."""

    model: TransformerConfig
    batch: int
    rates: tuple[float | None, ...]
    steps: int
    ranks_per_site: int
    methods: tuple[str, ...]
    compute_s: float = 0.0
    """Slept in a step besides."""

    def ours(self) -> dict[str, ShardsConfig]:
        """Our methods; with sites, each also with one message between two of them."""
        size = self.ranks_per_site
        chosen = {label: config for label, config in OURS.items() if label in self.methods}
        by_site = {
            f"{label}, by site": config.model_copy(update={"ranks_per_site": size})
            for label, config in chosen.items()
        }
        return chosen if size == 1 else chosen | by_site

    def torchs(self) -> dict[str, torch.dtype | None]:
        """Those of torch's FSDP2."""
        return {label: dtype for label, dtype in TORCHS.items() if label in self.methods}


class _Ours:
    def __init__(self, config: ShardsConfig, plan: Plan, transport: GlooTransport) -> None:
        whole = _model(plan)
        self.module = ShardedStage(whole, whole.parts(), transport.shard_group)
        peers = transport.peers("shards", "shard")
        self._shards = StageShards([self.module], peers, config, seed=transport.mesh.rank)
        self._step = 0

    def begin(self) -> None:
        self._shards.begin_step(self._step, 1)
        self._step += 1

    def end(self) -> None:
        self._shards.before_step()


class _Torchs:
    def __init__(self, dtype: torch.dtype | None, plan: Plan, world: int) -> None:
        self.module = _model(plan)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        mesh = init_device_mesh("cpu", (world,))
        for part in (*self.module.parts(), self.module):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def begin(self) -> None:
        """FSDP2's hooks do it."""

    def end(self) -> None:
        """FSDP2's hooks have done it."""


def _model(plan: Plan) -> TransformerStage:
    return build_layers(plan.model, 0, plan.model.layers, seed=0, device="cpu")


def run_host(host: int, plan: Plan, shape: SetRate) -> list[Row]:
    """Measure as one host of an emulated network, which is a site; its first rank's rows."""
    size = plan.ranks_per_site
    os.environ["WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) * size)
    with TemporaryDirectory() as folder:
        found = Path(folder) / "rows"
        mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _run_process, (host * size, plan, shape, found), size, start_method="fork"
        )
        rows: list[Row] = pickle.loads(found.read_bytes())
        return rows


def _run_process(local: int, first: int, plan: Plan, shape: SetRate, found: Path) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(first + local)
    with default_group(_TIMEOUT_S):
        rows = run_rank(plan, shape)
    if local == 0:
        found.write_bytes(pickle.dumps(rows))


def run_rank(plan: Plan, shape: SetRate) -> list[Row]:
    """Measure as one rank of the default group; rank 0 sets rates."""
    world = dist.get_world_size()
    transport = GlooTransport(1, 1, timeout_s=_TIMEOUT_S, shards=world)
    makers: dict[str, Callable[[], Any]] = {
        **{label: partial(_Torchs, dtype, plan, world) for label, dtype in plan.torchs().items()},
        **{label: partial(_Ours, config, plan, transport) for label, config in plan.ours().items()},
    }
    rows = []
    for label, make in makers.items():
        runner = make()
        optimizer = torch.optim.AdamW(runner.module.parameters(), lr=1e-4)
        for rate_bps in plan.rates:
            if transport.mesh.rank == 0:
                shape(rate_bps)
            loss = _step(runner, optimizer, plan, transport)[1]  # warm
            sent = sent_nbytes()
            steps = [_step(runner, optimizer, plan, transport) for _ in range(plan.steps)]
            seconds = tuple(step_s for step_s, _ in steps)
            nbytes = (sent_nbytes() - sent) // plan.steps
            numbers = {"step s": statistics.median(seconds), "MB a host": nbytes / 1e6}
            detail = {"rate_bps": rate_bps, "steps_s": seconds, "loss": loss}
            rows.append(Row(label, numbers, {"rate": format_rate(rate_bps)}, detail=detail))
            if transport.mesh.rank == 0:
                print(rows[-1], flush=True)
    first = {row.method: row.detail["loss"] for row in reversed(rows)}
    exact = [first[label] for label in ("fsdp 32", "torch fp32") if label in first]
    if max(exact, default=0.0) - min(exact, default=0.0) > 1e-6:
        raise RuntimeError(f"32 bits differ from torch's FSDP2, so nothing is reported: {first}")
    return rows


def _step(
    runner: Any, optimizer: torch.optim.Optimizer, plan: Plan, transport: GlooTransport
) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(transport.mesh.rank)
    shape = (plan.batch, plan.model.context)
    tokens = torch.randint(plan.model.vocab, shape, generator=generator)
    when_all_arrived(transport)
    begin_s = time.perf_counter()
    time.sleep(plan.compute_s)
    runner.begin()
    loss = nn.functional.cross_entropy(
        runner.module(tokens, None).flatten(0, 1).float(), tokens.flatten()
    )
    loss.backward()  # type: ignore[no-untyped-call]
    runner.end()
    optimizer.step()
    optimizer.zero_grad()
    when_all_arrived(transport)
    return time.perf_counter() - begin_s, loss.item()


def compared(row: Row, rows: Sequence[Row]) -> Row:
    """With `bound s`, and `x bf16`: a step of torch's FSDP2 in bf16 at that rate by it."""

    def step_s(method: str, rate: str) -> float | None:
        like = [r for r in rows if (r.method, r.conditions["rate"]) == (method, rate)]
        return like[0].numbers["step s"] if like else None

    numbers, rate_bps = row.numbers, row.detail["rate_bps"]
    mb, own_s = numbers["MB a host"] or 0.0, numbers["step s"]
    wire_s = 8e6 * mb / rate_bps if rate_bps else 0.0
    bf16_s = step_s("torch bf16", row.conditions["rate"])
    times = bf16_s / own_s if bf16_s and own_s else None
    bound_s = max(wire_s, step_s(row.method, format_rate(None)) or 0.0)
    return replace(row, numbers={**numbers, "bound s": bound_s, "x bf16": times})


def main() -> None:
    """Command line; needs root, for network namespaces."""
    methods = (*TORCHS, *OURS)
    command = command_line("benchmarks.shards.speed", __doc__)
    command.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    command.add_argument("--shards", type=int, default=2)
    command.add_argument("--ranks-per-site", type=int, default=1)
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--width", type=int, default=768)
    command.add_argument("--vocab", type=int, default=1024)
    command.add_argument("--tokens", type=int, default=64)
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--steps", type=int, default=5)
    command.add_argument("--methods", nargs="+", choices=methods, default=methods)
    options = command.parse_args()
    hosts, left = divmod(options.shards, options.ranks_per_site)
    if left:
        command.error(f"--shards {options.shards}: no multiple of --ranks-per-site")
    model = TransformerConfig(
        layers=options.layers,
        width=options.width,
        heads=max(1, options.width // 64),
        vocab=options.vocab,
        context=options.tokens,
    )
    rates = (*map(parse_rate, options.rates), None)
    plan = Plan(
        model,
        options.batch,
        rates,
        options.steps,
        options.ranks_per_site,
        tuple(options.methods),
    )
    records = Records(options.json)
    with ShapedNetwork(NetworkSpec.of(hosts)) as network:
        job = partial(run_host, plan=plan, shape=partial(set_rate, network))
        by_rank: list[list[Row]] = network.run(job, timeout_s=_ALL_S)
    rows = [compared(row, by_rank[0]) for row in by_rank[0]]
    print(summary(rows, {"step s": ".3f", "MB a host": ".2f", "bound s": ".3f", "x bf16": ".2f"}))
    settings = {**asdict(plan), "model": model.model_dump(), "shards": options.shards}
    for row in rows:
        records.add(settings, row)


if __name__ == "__main__":
    main()
