"""`python -m benchmarks.time_to_loss`: how long until a model is as good as uncompressed, by link.

    python -m benchmarks.time_to_loss --train valid.txt --eval test.txt --smollm2 FOLDER \
        --json rows.jsonl

Parts add rows to FILE; what it has is not measured again, so it may take several sittings.
`losses`: real runs of every method, all ranks on this machine. `seconds`: steps over emulated links
with real messages and a slept GPU (as root: it makes networks). `hours`: their sum for a whole run,
and a table by link. `plan`: what `thinpipe plan` knows of losses, a file in its folder. `whole`:
runs over links, computed here, against such a sum. A method has arrived if its held-out loss ends
at most .01 nats above fp32's. Without `--smollm2` the task is a GPT-2 shape from scratch.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Records, command_line, parse_options, write_tokenizer
from benchmarks.time_to_loss import losses, plan, seconds
from benchmarks.time_to_loss.hours import compose, table
from benchmarks.time_to_loss.tasks import (
    BASELINE,
    GPUS,
    LAYOUTS,
    METHODS,
    LayoutName,
    Task,
    gpt2,
    smollm2,
)
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.links import parse_rate, parse_time

_PARTS = ("losses", "seconds", "hours", "plan", "whole")
_VOCABULARY = 5000
QUICK: dict[LayoutName, Sequence[str]] = {
    "one": (),
    "pipeline": ("bf16", "AQ-SGD 3/6", "transform .7/.9", "torch GPipe bf16"),
    "replicas": ("CocktailSGD", "ef_gradients .015", "DeMo", "SparseLoCo", "torch DDP fp32"),
    "both": ("AQ-SGD 3/6, CocktailSGD",),
    "shards": ("QSDP W8G8", "torch FSDP2 bf16"),
}
"""Methods of layouts."""
_TIMED = ("task", "layout", "method", "gpu", "rate_bps", "delay_ms", "dilation")


class _Rows(Records):
    """Each result has its `part`."""

    def of(self, part: str) -> list[dict[str, Any]]:
        return [dict(row) for row in self.results if row["part"] == part]

    def has(self, part: str, **about: Any) -> bool:
        return any(about.items() <= row.items() for row in self.of(part))

    def put(self, part: str, row: Mapping[str, Any]) -> None:
        self.add({}, {"part": part, **row})


def _train(options: argparse.Namespace, task: Task, rows: _Rows) -> None:
    texts = (options.train, options.eval)
    digest = hashlib.sha256(b"".join(text.read_bytes() for text in texts)).hexdigest()[:16]

    def run(layout: LayoutName, method: str, seed: int, lr: float) -> None:
        about = {"task": task.name, "layout": layout, "method": method, "seed": seed}
        about |= {"lr": lr, "steps": task.steps, "texts": digest, "precision": "fp32"}
        if rows.has("losses", **about):
            return
        try:
            found = losses.measure(task, layout, method, texts=texts, seed=seed, lr=lr)
        except RuntimeError as error:  # at this rate
            print(f"{about}: failed\n{error}", flush=True)
            return
        rows.put("losses", {**found, **about, "epochs": task.epochs})
        print(f"{about}: held out {found['final']:.4f}", flush=True)

    pool = ThreadPoolExecutor(options.at_once)
    runs = [
        pool.submit(run, layout, method, seed, lr)
        for layout in options.layouts
        for seed, lr in product(range(options.seeds), options.lr or [task.lr])
        for method in _wanted(options, METHODS[layout])
    ]
    try:
        for one in runs:
            one.result()
    finally:  # Ctrl-C does not begin the next
        pool.shutdown(cancel_futures=True)


def _time(options: argparse.Namespace, task: Task, rows: _Rows, folder: Path) -> None:
    texts = (options.train, options.eval)
    rates = [parse_rate(rate) for rate in options.rates]
    cut = {"pipeline": seconds.pipelines, "both": seconds.both}
    whole: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
        "replicas": seconds.replicas,
        "8 replicas": partial(seconds.replicas, layout="8 replicas"),
        "shards": seconds.shards,
    }
    for gpu, layout in product(options.gpus, options.layouts):
        under = seconds.Conditions(gpu, rates, options.delays)
        missing = _untimed(options, task, layout, under, rows)
        if missing and layout in ("both", "shards") and "pretrained" in task.model:
            print(f"{task.name}: {layout} is timed without --smollm2 only", flush=True)
        elif missing and layout in cut:
            file = losses.run_file(task, layout, BASELINE, texts=texts, seed=0, lr=task.lr)
            recorded = (options.recorded or folder) / f"{task.name}_{layout}.pt"
            more = {"recorded": recorded, "dilation": options.dilation}
            config = RunConfig.model_validate(file)
            _add_new(rows, cut[layout](task, missing, under, config=config, **more))
        elif missing and layout in whole:
            _add_new(rows, whole[layout](task, missing, under))
        elif missing and layout not in ("one", *cut):
            print(f"{task.name}: {layout} is not timed", flush=True)


def _add_new(rows: _Rows, found: Iterable[Mapping[str, Any]]) -> None:
    """Links are measured together, also those that a method has already."""
    for row in found:
        if not rows.has("seconds", **{name: row[name] for name in _TIMED if name in row}):
            rows.put("seconds", row)


def _untimed(
    options: argparse.Namespace,
    task: Task,
    layout: LayoutName,
    under: seconds.Conditions,
    rows: _Rows,
) -> list[str]:
    """Methods of a layout that lack a link."""
    names = [*METHODS[layout], *seconds.TORCH.get(layout, ())]
    about = {"task": task.name, "layout": layout, "gpu": under.gpu}
    about |= {"dilation": options.dilation} if layout in ("pipeline", "both") else {}
    links = [
        {"rate_bps": rate, "delay_ms": 1e3 * parse_time(delay)}
        for rate, delay in product(under.rates, under.delays)
    ]
    return [
        name
        for name in _wanted(options, names)
        if not all(rows.has("seconds", **about, method=name, **link) for link in links)
    ]


def _compare(options: argparse.Namespace, task: Task, rows: _Rows) -> None:
    texts = (options.train, options.eval)
    for layout, rate in product(options.layouts, options.rates):
        for method in _wanted(options, METHODS[layout]):
            about = {"task": task.name, "layout": layout, "method": method, "rate": rate}
            if not rows.has("whole", **about):
                rows.put("whole", about | losses.compare(task, layout, method, rate, texts=texts))


def _wanted(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    return [name for name in names if not options.methods or name in (*options.methods, BASELINE)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and print the tables."""
    options = _parse(arguments)
    rows = _Rows(options.json, go_on=True)
    with TemporaryDirectory() as folder:
        task = _task(options, Path(folder))
        if options.epochs:
            name = f"{task.name}, {options.epochs} epochs"
            task = replace(task, name=name, epochs=options.epochs)
        if "losses" in options.parts:
            _train(options, task, rows)
        if "seconds" in options.parts:
            _time(options, task, rows, Path(folder))
        if "whole" in options.parts:
            _compare(options, task, rows)
    if "hours" in options.parts:
        trained = [row for row in rows.of("losses") if row["steps"] == task.steps]
        dilation = options.dilation
        timed = [r for r in rows.of("seconds") if r.get("dilation", dilation) == dilation]
        found = [row for row in compose(trained, timed) if row.task == task.name]
        rows.keep(lambda row: (row["part"], row["task"]) != ("hours", task.name))
        for row in found:
            rows.put("hours", asdict(row))
        for name, layout, gpu in dict.fromkeys((row.task, row.layout, row.gpu) for row in found):
            print(f"\n{name}, {layout}, {gpu}\n\n{table(found, name, layout, gpu)}", flush=True)
    if "plan" in options.parts:
        plan.write(rows.of("losses"), plan.PARITY, plan.FILE)


def _task(options: argparse.Namespace, folder: Path) -> Task:
    if options.smollm2 is not None:
        return smollm2(options.smollm2.resolve(), share=options.share)
    both = folder / "both.txt"
    both.write_bytes(options.train.read_bytes() + options.eval.read_bytes())
    write_tokenizer(folder, both, vocab=_VOCABULARY)
    return gpt2(folder, share=options.share)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.time_to_loss", __doc__)
    command.add_argument("--train", type=Path, required=True, help="text to train on")
    command.add_argument("--eval", type=Path, required=True, help="held-out text")
    command.add_argument("--smollm2", type=Path, metavar="FOLDER", help="SmolLM2-135M")
    command.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS[:-2])
    command.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    command.add_argument("--methods", nargs="+", metavar="NAME", help="fp32 and these (all)")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--lr", type=float, nargs="+", help="learning rates; the best counts")
    command.add_argument("--at-once", type=int, default=1, help="runs of losses that share a GPU")
    command.add_argument("--share", type=float, default=1.0, help="of the steps (1)")
    command.add_argument("--epochs", type=int, help="instead of 1, or 3 of SmolLM2; another task")
    command.add_argument("--gpus", nargs="+", choices=GPUS, default=[GPUS[0]])
    rates = ["none", "10mbit", "100mbit", "500mbit", "1gbit"]
    command.add_argument("--rates", nargs="+", default=rates, help="of every up- and downlink")
    command.add_argument("--delays", nargs="+", default=["0ms", "25ms", "50ms"], help="one way")
    slower = "how much slower than their GPU, and their links, stages are (8)"
    command.add_argument("--dilation", type=float, default=8.0, help=slower)
    command.add_argument("--recorded", type=Path, metavar="FOLDER", help="to keep what stages send")
    quick = {"seeds": 1, "share": 0.1, "delays": ["0ms"], "rates": ["none", "100mbit"]}
    quick |= {"methods": [*chain(*QUICK.values())], "layouts": [*QUICK]}
    options = parse_options(command, arguments, "quick", quick)
    if options.json is None:
        command.error("--json FILE is needed: it holds what was measured")
    return options


if __name__ == "__main__":
    main()
