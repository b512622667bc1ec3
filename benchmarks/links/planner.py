"""`python -m benchmarks.links.planner`: the step `thinpipe plan` predicts against the measured one.

Two forms on emulated networks (`launch/lab/`). "slept": the paper-shaped stages of
`benchmarks.links.workloads` with chosen times, real codecs and links. "real": a small transformer
on one core per stage, whose blocks the hosts measure themselves. Also compares the cuts of `cuts =
"auto"` with those of torchgpipe's balancer. With a delay, hosts run with
net.ipv4.tcp_slow_start_after_idle = 0, as plan assumes.
"""

import argparse
import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torchgpipe.balance import balance_cost

from benchmarks.harness import (
    PREDICTED,
    Records,
    Row,
    command_line,
    format_table,
    prediction_numbers,
    summary,
)
from benchmarks.links.ranks import Plan, RankResult, keep_windows, run_host
from benchmarks.links.runners import Method
from benchmarks.links.workloads import PaperShape
from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.launch.build import build
from thinpipe.launch.config.boundary import BackwardConfig, BoundaryConfig, ForwardConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import measure_messages
from thinpipe.launch.cuts.partition import Problem, best_cuts
from thinpipe.launch.cuts.profile import BlockCost, measure_blocks
from thinpipe.launch.host.links import format_rate, parse_rate
from thinpipe.launch.host.network import Network
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.plan.predict import Prediction, predict
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.config import DirectConfig, RawConfig
from thinpipe.pipeline.wire.told import ScheduleName

_LIMIT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A configuration. `stage_s` are forwards in seconds per microbatch, each backward is twice
    that; empty for real compute, with `layers` blocks cut in the middle.
    """

    name: str
    schedule: ScheduleName
    rate: str
    delay_s: float
    forward: ForwardConfig
    backward: BackwardConfig
    stage_s: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.stage_s) or 2


def _raw(cast: str) -> tuple[RawConfig, RawConfig]:
    spec = RawConfig.model_validate({"format": cast})
    return spec, spec


def _quantized(forward: int, backward: int) -> tuple[AqsgdConfig, DirectConfig]:
    return AqsgdConfig(bits=forward, delta="uniform", first_visit=8), DirectConfig(bits=backward)


_EQUAL = (0.072,) * 4
CASES = (
    Case("2 stages fp32", "GPipe", "500mbit", 0.0, *_raw("fp32"), (0.072, 0.072)),
    Case("4 stages bf16", "1F1B", "300mbit", 0.01, *_raw("bf16"), _EQUAL),
    Case("4 stages fw3/bw6", "Deep1F1B", "100mbit", 0.02, *_quantized(3, 6), _EQUAL),
    Case("4 stages fp32", "Deep1F1B", "100mbit", 0.0, *_raw("fp32"), _EQUAL),
    Case("3 unequal fw2/bw4", "Deep1F1B", "50mbit", 0.01, *_quantized(2, 4), (0.04, 0.1, 0.06)),
    Case("4 stages fw4/bw8", "GPipe", "200mbit", 0.05, *_quantized(4, 8), _EQUAL),
    Case("real fw4/bw8", "1F1B", "20mbit", 0.01, *_quantized(4, 8)),
    Case("real fp32", "Deep1F1B", "200mbit", 0.0, *_raw("fp32")),
)


def measure(case: Case, shape: PaperShape, steps: int) -> Row:
    """Predict and measure one case."""
    spec = NetworkSpec.of(case.stages, case.rate, delay=f"{case.delay_s}s")
    links = Network.uniform(case.stages, parse_rate(case.rate), case.delay_s)
    config = _run_config(case, shape)
    if not case.stage_s:
        return _measure_real(case, config, spec, links, steps)
    blocks = [BlockCost(seconds, 2 * seconds) for seconds in case.stage_s]
    predicted = predict(config, [blocks] * case.stages, measure_messages(config), links)
    method = Method(case.name, "thinpipe", case.schedule, case.forward, case.backward)
    with ShapedNetwork(spec) as network:
        ranks: list[list[RankResult]] = network.run(
            partial(_slept, case=case, shape=shape, method=method, steps=steps), timeout_s=_LIMIT_S
        )
    all_steps = [rank[0].steps_s for rank in ranks]
    # these stages have no weights and share no losses: only the pipeline itself is compared
    return _row(case, predicted, predicted.passes_s, all_steps)


def _slept(
    host: int, case: Case, shape: PaperShape, method: Method, steps: int
) -> list[RankResult]:
    own = replace(shape, forward_s=case.stage_s[host], backward_s=2 * case.stage_s[host])
    plan = Plan(own, [method], [None], steps, delay_s=case.delay_s, keep_window=case.delay_s > 0)
    return run_host(host, plan)


def _measure_real(
    case: Case, config: RunConfig, spec: NetworkSpec, links: Network, steps: int
) -> Row:
    with ShapedNetwork(spec) as network:
        hosts = network.run(partial(_real, config=config, steps=steps), timeout_s=_LIMIT_S)
    predicted = predict(config, [blocks for blocks, _ in hosts], measure_messages(config), links)
    return _row(case, predicted, predicted.step_s, [steps_s for _, steps_s in hosts])


def _real(host: int, config: RunConfig, steps: int) -> tuple[list[BlockCost], tuple[float, ...]]:
    """Run on one host: measure the blocks at the same time as the others, then train."""
    keep_windows()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_S))
    transport = GlooTransport(config.pipeline.stages, 1, timeout_s=_LIMIT_S)
    dist.barrier()
    blocks = measure_blocks(config).costs
    engine = build(config, transport, run_id=1, total_steps=100).engine
    samples, tokens = config.train.batch_size, config.data.sequence_length
    text_BT = torch.randint(256, (samples, tokens + 1), generator=torch.manual_seed(0))
    batch = Batch(text_BT[:, :-1], text_BT[:, 1:].contiguous(), torch.arange(samples))
    times_s = []
    for step in range(steps + 2):  # two discarded: first visits, then a warm-up
        dist.barrier()
        begin_s = time.perf_counter()
        engine.train_step(batch, step)
        times_s.append(time.perf_counter() - begin_s)
    dist.barrier()
    dist.destroy_process_group()
    return blocks, tuple(times_s[2:])


def _row(
    case: Case, prediction: Prediction, predicted_s: float, ranks_s: Sequence[Sequence[float]]
) -> Row:
    steps_s = [max(times_s) for times_s in zip(*ranks_s, strict=True)]
    return Row(
        f"{case.name}, {case.schedule}",
        prediction_numbers(predicted_s, steps_s),
        {"rate": format_rate(parse_rate(case.rate)), "delay ms": f"{case.delay_s * 1e3:g}"},
        detail={"steps_s": steps_s, "bubble": prediction.bubble},
    )


def _run_config(case: Case, shape: PaperShape) -> RunConfig:
    slept = bool(case.stage_s)
    width, tokens = (shape.width, shape.tokens) if slept else (256, 128)
    return RunConfig.model_validate(
        {
            "model": {
                "layers": case.stages if slept else 4,
                "width": width,
                "heads": 4,
                "context": tokens,
            },
            "data": {"sequence_length": tokens},
            "pipeline": {
                "cuts": range(1, case.stages) if slept else [2],
                "schedule": case.schedule,
                "microbatches": shape.microbatches,
            },
            "boundary": [BoundaryConfig(forward=case.forward, backward=case.backward)],
            "train": {"batch_size": shape.microbatches * (1 if slept else 4)},
        }
    )


def partitions() -> list[tuple[str, str, str, str]]:
    """Largest load of a stage, by our cuts and by torchgpipe's."""
    rows = []
    problems = (
        ("30 equal blocks", [1] * 30, 8),
        ("embedding + 24 + head", [3, *[10] * 24, 15], 8),
        ("14 equal blocks", [1] * 14, 4),
    )
    for name, costs, stages in problems:
        free = [[0.0] * len(costs)] * stages
        limits = [math.inf] * stages
        problem = Problem([costs] * stages, free, [0.0] * stages, free, limits)
        bounds = [0, *best_cuts(problem), len(costs)]
        ours = max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))
        sizes = balance_cost(costs, stages)
        theirs = max(sum(costs[sum(sizes[:i]) :][:n]) for i, n in enumerate(sizes))
        rows.append((f"{name}, {stages} stages", f"{ours}", f"{theirs}", f"{theirs / ours:.2f}"))
    return rows


def _arguments() -> argparse.Namespace:
    command = command_line("benchmarks.links.planner", __doc__)
    names = [case.name for case in CASES]
    command.add_argument("--cases", nargs="+", default=names, choices=names, metavar="NAME")
    command.add_argument("--steps", type=int, default=5, help="measured steps of each case")
    command.add_argument("--small", action="store_true", help="short sequences, for a quick try")
    return command.parse_args()


def main() -> None:
    """Predict, measure, print."""
    arguments = _arguments()
    torch.set_num_threads(1)  # the ranks are forked from here, and share the cores
    shape = PaperShape(tokens=128, width=256, microbatches=4) if arguments.small else PaperShape()
    records, rows = Records(arguments.json), list[Row]()
    for case in (case for case in CASES if case.name in arguments.cases):
        load = os.getloadavg()[0]
        rows.append(measure(case, shape, arguments.steps))
        facts = {**asdict(case), "shape": asdict(shape), "load": load}
        facts |= {"forward": case.forward.model_dump(), "backward": case.backward.model_dump()}
        records.add(facts, rows[-1])
    print(summary(rows, PREDICTED))
    print(format_table(("largest load of", "ours", "torchgpipe", "ratio"), partitions()))


if __name__ == "__main__":
    main()
