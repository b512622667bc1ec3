"""What proof of state and saving cost a step of the paper-shaped benchmark.

    python -m benchmarks.checkpoint_cost --json cost.jsonl

Four stages on this machine, compute slept at published times (`benchmarks.links.workloads`), real
codecs, memories and messages; each stage holds weights and two moments of the given size. Blocks of
steps of each kind take turns in one run, so that they meet the same machine:

    plain      nothing
    digests    what `train.verify_every` does, in every step; the table divides by 100
    save       one save begins in the block, and is written beside it

Seconds are wall time of the slowest rank; "CPU" is over all ranks and threads.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Records, format_table, quantiles
from benchmarks.links.workloads import PaperShape
from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.launch.build import Given, build
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.checkpoint.state import Checkpoints
from thinpipe.launch.components import Built
from thinpipe.launch.config.boundary import BoundaryConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.sections import CheckpointConfig
from thinpipe.launch.distributed.session import Session
from thinpipe.launch.distributed.store import connect_store, hold_store
from thinpipe.launch.run.program import Pipeline, config_of
from thinpipe.launch.run.proof import Proof, digest
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.config import DirectConfig
from thinpipe.pipeline.models.own.config import Example

KINDS = ("plain", "digests", "save")
_EVERY = 100
"""Default of `train.verify_every`."""
_LIMIT_S = 600.0
_TENSOR_NUMEL = 2**21


@dataclass(frozen=True)
class Plan:
    """What is measured: stages with so many weights each, blocks of steps, and their rounds."""

    stages: int
    numel: int
    steps: int
    rounds: int
    shape: PaperShape


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x_BTD: Tensor, stage: "Stage") -> Tensor:
        ctx.stage, ctx.shape = stage, x_BTD.shape
        time.sleep(stage.shape.forward_s)
        return stage.next_value(x_BTD)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.stage.shape.backward_s)
        return torch.zeros(1), ctx.stage.next_value(ctx.shape), None


class Stage(nn.Module):
    """Sleeps instead of computing, and holds weights that nothing computes with."""

    def __init__(self, shape: PaperShape, numel: int) -> None:
        super().__init__()
        self.shape, self._calls = shape, 0
        self._buffers_BTD: list[Tensor] = []
        self.weight = nn.Parameter(torch.zeros(1))
        count = max(1, numel // _TENSOR_NUMEL)
        self.held = nn.ParameterList(
            nn.Parameter(torch.zeros(numel // count)) for _ in range(count)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Sleep and return an activation."""
        if x_BTD.is_meta:
            return x_BTD * self.weight
        y_BTD: Tensor = _Sleep.apply(self.weight, x_BTD, self)  # type: ignore[no-untyped-call]
        return y_BTD

    def next_value(self, like: Any) -> Tensor:
        """One of three tensors by turns: activations change between visits."""
        shape = like.shape if isinstance(like, Tensor) else like
        if not self._buffers_BTD:
            self._buffers_BTD = [torch.randn(shape) for _ in range(3)]
        self._calls += 1
        return self._buffers_BTD[self._calls % 3].detach()


class Still(torch.optim.Optimizer):
    """Holds what Adam holds and changes nothing: on the paper's devices its step takes no time."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        for parameter in parameters:
            self.state[parameter] = {
                name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def _loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return output.flatten()[:1].sum() * 1e-6, target.numel()


def _config(plan: Plan) -> RunConfig:
    shape = plan.shape
    boundary = BoundaryConfig(forward=AqsgdConfig(bits=3), backward=DirectConfig(bits=6))
    pipeline = Pipeline(
        lambda: nn.Sequential(*[Stage(shape, plan.numel) for _ in range(plan.stages)]),
        _loss,
        cuts=list(range(1, plan.stages)),
        microbatches=shape.microbatches,
        boundary=boundary,
        schedule="Deep1F1B",
        device="cpu",
    )
    config = config_of(pipeline.sections, "benchmark")
    x_TD = torch.empty(*shape.boundary[1:], device="meta")
    model = pipeline.model.with_example(Example(x_TD, torch.empty(1, device="meta")))
    return config.model_copy(update={"model": model}).with_train(batch_size=shape.microbatches)


class Bench:
    """One rank; all ranks call the same methods alike."""

    def __init__(self, plan: Plan, built: Built, saves: Checkpoints) -> None:
        self._plan, self._built, self._saves = plan, built, saves
        transport = built.engine.transport
        self._proof = Proof(built, transport, 1)
        ids = torch.arange(plan.shape.microbatches)
        inputs = torch.zeros(len(ids), *plan.shape.boundary[1:])
        self._batch = Batch(inputs, torch.zeros(len(ids), 1), ids)
        self._done, self._step_s = 0, 0.0

    def block(self, kind: str) -> dict[str, float]:
        """Seconds of a block of steps, and of CPU time; of a save also whether it was written."""
        dist.barrier()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for number in range(self._plan.steps):
            self._step()
            self._after(kind, first=number == 0)
        dist.barrier()
        found = {"s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
        return found | {"written": float(self._saves.wait())}

    def _step(self) -> None:
        began_s = time.perf_counter()
        self._built.engine.train_step(self._batch, self._done)
        self._done, self._step_s = self._done + 1, time.perf_counter() - began_s

    def _after(self, kind: str, *, first: bool) -> None:
        if kind == "digests":
            self._proof.check(self._done)
            digest(list(self._built.optimizer.state))
            digest(
                [m for moments in self._built.optimizer.state.values() for m in moments.values()]
            )
        elif kind == "save" and first:
            self._saves.start(self._done)


def _rank(rank: int, port: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    store = connect_store(("127.0.0.1", port), wait_s=_LIMIT_S)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.stages, timeout=limit)
    config, transport = _config(plan), GlooTransport(plan.stages, 1, timeout_s=_LIMIT_S)
    given = Given(lambda named: Still(list(named.values())))
    built = build(config, transport, run_id=1, total_steps=10**6, given=given)
    session = Session(store, transport, 1, 0, None)
    options, facts = CheckpointConfig(keep=1), {"config": config.shared()}
    saves = Checkpoints(Path(folder) / str(rank), options, built, session, facts)
    bench = Bench(plan, built, saves)
    numel = sum(p.numel() for stage in built.stages for p in module_of(stage).parameters())
    for kind in ("plain", "save"):  # first visits, new memory for the copy
        bench.block(kind)
    found = []
    for turn in range(plan.rounds):
        for kind in (*KINDS[turn % len(KINDS) :], *KINDS[: turn % len(KINDS)]):
            found.append({"kind": kind, "round": turn, **bench.block(kind)})
    torch.save({"numel": numel, "blocks": found}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(plan: Plan) -> list[dict[str, Any]]:
    """What every rank found."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    store = hold_store(server, wait_s=_LIMIT_S)
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _rank, args=(port, plan, folder), nprocs=plan.stages
        )
        del store
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(plan.stages)]


def _blocks(ranks: Sequence[dict[str, Any]], kind: str) -> list[dict[str, float]]:
    """By round: seconds of the slowest rank, CPU time of all."""
    own = [[b for b in rank["blocks"] if b["kind"] == kind] for rank in ranks]
    return [
        {
            "s": max(block["s"] for block in blocks),
            "cpu_s": sum(block["cpu_s"] for block in blocks),
            "written": min(block["written"] for block in blocks),
        }
        for blocks in zip(*own, strict=True)
    ]


def _table(plan: Plan, ranks: Sequence[dict[str, Any]], records: Records) -> str:
    plain = _blocks(ranks, "plain")
    step_s = statistics.median(block["s"] for block in plain) / plan.steps
    state = 12 * ranks[0]["numel"] / 2**30
    rows = []
    shares: dict[str, Callable[[float], float]] = {
        "digests": lambda extra_s: extra_s / plan.steps / _EVERY,
        "save": lambda extra_s: extra_s,
    }
    for kind, per in shares.items():
        pairs = list(zip(_blocks(ranks, kind), plain, strict=True))
        extra = {
            unit: [per(block[unit] - before[unit]) for block, before in pairs]
            for unit in ("s", "cpu_s")
        }
        spread = {unit: quantiles(values) for unit, values in extra.items()}
        records.add(
            {"kind": kind, "stages": plan.stages, "state_gib": state, "step_s": step_s}, spread
        )
        wall_s, cpu_s = (statistics.median(values) for values in extra.values())
        each = f"every {max(1, round(wall_s / step_s / 0.01))} steps" if kind == "save" else ""
        rows.append([kind, f"{wall_s:.4f}", f"{wall_s / step_s:.2%}", f"{cpu_s:.4f}", each])
    heads = ("kind", "s per step (save: per save)", "of a step", "CPU s, all ranks", "1 % if")
    return f"{state:.2f} GiB of state per rank, a step takes {step_s:.3f} s\n" + format_table(
        heads, rows
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoint_cost", description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=30_000_000, help="of each stage")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="compute sleeps a tenth as long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = PaperShape()
    if options.quick:
        shape = replace(shape, forward_s=shape.forward_s / 10, backward_s=shape.backward_s / 10)
    plan = Plan(options.stages, options.parameters, options.steps, options.rounds, shape)
    print(_table(plan, measure(plan), Records(options.json)))


if __name__ == "__main__":
    main()
