"""Copies of stages in RAM, and a spare that takes a lost stage's place from them.

    python -m benchmarks.spares --json out.jsonl

Emulated hosts with 1 ms between them, each with a launcher, a relay and a stage (as root).

*Copies*: four stages, GPT2-XL's messages in 4 and 8 bits, compute slept, 32 microbatches, and 300
MB of weights and optimizer per stage. A copy costs what a step takes longer than without copies.
`share` is that, of all time; `cores busy` is of the busiest step. Stages and links can be
`--dilation` times slower, as four hosts share this machine's cores; seconds are divided by it.
*Spare*: the quickstart's model
on four hosts, and a fifth that waits. A machine is killed; `spare s` is from the spare's call to
the end of the next step.
"""

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.elastic import HOSTS, hosts_run
from benchmarks.harness import Records, Row, command_line, parse_options, summary
from benchmarks.links.workloads import PaperShape
from tests.faults.hosts import kill_machine
from tests.waiting import until
from thinpipe.launch.host.links import parse_rate

_PAPER = PaperShape()
_VALUES = 25_000_000  # of a stage: 300 MB with AdamW's moments
_COLUMNS = dict.fromkeys(("step s", "a copy s", "share", "cores busy", "spare s"), ".2f")
_DILATION = "SPARES_DILATION"
"""Environment variable, which ranks have from here."""
_QUICKSTART = Path(__file__).parents[1] / "examples/quickstart.toml"
_COPIED = """
[model]
factory = "benchmarks.spares:model"
[data]
path = "TEXT"
sequence_length = 1024
train_sequences = 2048
eval_sequences = 4
[pipeline]
device = "cpu"
cuts = [2, 3, 4]
microbatches = 32
[[boundary]]
forward = { kind = "direct", bits = 4 }
backward = { kind = "direct", bits = 8 }
[train]
batch_size = 32
"""


def _dilation() -> float:
    return float(os.environ.get(_DILATION, "1"))


class _Slept(torch.autograd.Function):
    """Takes the time of a stage; its weights have a gradient in one microbatch of a step."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weights: Tensor) -> Tensor:
        ctx.weights = weights
        time.sleep(_dilation() * _PAPER.forward_s)
        return x_BTD.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        time.sleep(_dilation() * _PAPER.backward_s)
        first = ctx.weights.grad is None
        return gradients[0], torch.zeros_like(ctx.weights) if first else None


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(_VALUES))

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = _Slept.apply(x_BTD, self.weights)  # type: ignore[no-untyped-call]
        return y_BTD


def model() -> nn.Sequential:
    """Four stages that sleep, between an embedding and a head."""
    ends = nn.Embedding(256, _PAPER.width), nn.Linear(_PAPER.width, 256)
    return nn.Sequential(ends[0], *(_Stage() for _ in range(HOSTS)), ends[1])


def copies(given: Namespace) -> Iterator[Row]:
    """Steps at each rate without copies, and with one every so many steps."""
    for rate in given.rates:
        steps_s, busy = _steps(rate, given.steps)
        usual_s, numbers = median(steps_s), {"cores busy": busy}
        yield Row("copies", {"step s": usual_s, **numbers}, {"rate": rate, "every": "never"})
        for every in given.every:
            # whole periods, without the first, whose copy is made as the run begins
            steps_s, busy = _steps(rate, max(given.steps // every, 1) * every, every)
            more_s = every * ((mean_s := fmean(steps_s)) - usual_s)
            numbers = {"step s": mean_s, "a copy s": more_s, "share": more_s / every / mean_s}
            numbers["cores busy"] = busy
            yield Row("copies", numbers, {"rate": rate, "every": every})


def _steps(rate: str, steps: int, every: int = 0) -> tuple[list[float], float]:
    """Seconds of each, and how busy all cores were in the busiest."""
    bps, slower = parse_rate(rate), _dilation()
    links = f"{bps / slower:.0f}bit" if bps else rate, f"{slower}ms"
    with hosts_run(*links, _COPIED, *[f"checkpoint.ram_every={every}"] * bool(every)) as run:
        first = max(every, 2)
        busy = list[float]()
        for step in range(first, first + steps + 1):
            run.wait_for_step(step)
            busy.append(psutil.cpu_percent() / 100)
        seconds = [record.step_s / slower for record in run.records()[first : first + steps]]
        return seconds, max(busy[1:])


def spare(seed: int) -> Row:
    """How soon the run goes on once the spare is called."""
    settings = [f"run.seed={seed}", "checkpoint.ram_every=5", "train.epochs=1000"]
    settings.append("network.patience_s=3")
    text = _QUICKSTART.read_text(encoding="utf-8")
    with hosts_run("100mbit", "1ms", text, *settings, options=()) as run:  # it says what happens
        run.wait_for_step(8)
        said = run.log(HOSTS)
        said.touch()
        run.start(HOSTS, joins=True)
        until(lambda: "waiting as a spare" in said.read_text(encoding="utf-8"))
        done = run.steps()
        until(lambda: run.steps() > done + 5)
        kill_machine(run, 1)
        until(lambda: "takes the place of" in said.read_text(encoding="utf-8"))
        called_s = time.monotonic()
        until(lambda: "all went back" in run.text())
        done = run.steps()
        until(lambda: run.steps() > done)
        return Row("spare", {"spare s": time.monotonic() - called_s}, seed=seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line."""
    command = command_line("benchmarks.spares", __doc__)
    command.add_argument("--rates", nargs="*", default=["1gbit", "100mbit"], help="of copies")
    command.add_argument("--every", type=int, nargs="+", default=[5], help="steps of a copy")
    command.add_argument("--steps", type=int, default=10, help="that are measured (default 10)")
    command.add_argument("--dilation", type=float, default=1.0, help="of stages and links (1)")
    command.add_argument("--seeds", type=int, default=5, help="spares that are called (default 5)")
    options = parse_options(command, arguments, "quick", {"rates": ["1gbit"], "seeds": 1})
    os.environ[_DILATION] = str(options.dilation)
    records, rows = Records(options.json), list[Row]()
    for row in chain(copies(options), map(spare, range(options.seeds))):
        print(row, flush=True)
        records.add({"steps": options.steps, "dilation": options.dilation}, row)
        rows.append(row)
    for kind in dict.fromkeys(row.method for row in rows):
        print(summary([row for row in rows if row.method == kind], _COLUMNS))


if __name__ == "__main__":
    main()
