"""Does a model learn as well when replicas exchange a hundred times less? Methods side by side.

    python -m benchmarks.replicas.parity --text valid.txt test.txt --seeds 3 --json out.jsonl

Every method trains replicas of one model from the same weights on the same batches. What is
compared is the global model, the one a user would keep. Ratios are counted at the links. Models
(`benchmarks/replicas/settings.py`) are pretrained in one piece on the first text, once for all
seeds, which order the batches, and tuned by replicas on the second.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks.fidelity.finetuning import pretrain
from benchmarks.harness import (
    Records,
    Row,
    command_line,
    parse_options,
    summary,
    with_baseline,
    with_gaps,
)
from benchmarks.replicas.cost import cpu_ns
from benchmarks.replicas.settings import GPT2, SETTINGS, Setting, read_corpus, shortened
from benchmarks.replicas.training import Method, train
from benchmarks.theme import GRID, INK, SERIES

BASELINE = "all-reduce fp32"
_STREAMING = {"interval": 30, "fragments": 3, "overlap": 5, "mix": 0.5, "bits": 4, "bucket_mb": 2.0}


def _cocktail(label: str, subset: float, topk: float, **options: object) -> Method:
    return Method(label, "cocktail", {"subset": subset, "topk": topk, "bits": 4, **options})


METHODS = (
    Method(BASELINE, "allreduce", {}),
    Method("ef_updates p.25", "ef_updates", {"subset": 0.25}),
    Method("ef_updates p.125", "ef_updates", {}),
    _cocktail("cocktail p.19 k.2 b4", 0.19, 0.2),
    _cocktail("cocktail p.1 k.2 b4", 0.1, 0.2),
    Method("ef_gradients .03", "ef_gradients", {"fraction": 0.03}),
    Method("ef_gradients .015", "ef_gradients", {}),
    Method("ef_gradients .015, delayed", "ef_gradients", {"delayed": True}),
    Method("top-k .0082 bf16", "topk", {"fraction": 0.0082, "bits": 16}),
    Method("top-k .008 4 bits", "topk", {"fraction": 0.008, "bits": 4}),
    Method("quantize 1 bit", "quantize", {"bits": 1}),
    Method("DeMo k 32", "demo", {}),
    Method("DeMo k 24", "demo", {"kept": 24}),
    Method("DeMo k 32, look-ahead", "demo", {"look_ahead": True}),
    Method("DeMo k 32, a third of the rate", "demo", {}, rate=0.3),
    Method("SparseLoCo H 30", "sparse_loco", {}),
    Method("DiLoCo H 30", "diloco", {}),
    Method("streaming DiLoCo H 30, 4 bits", "diloco", _STREAMING),
    Method("bytegrad", "bytegrad", {}),
    Method("qadam", "qadam", {"warmup_steps": 64}),
    Method("decentralized ring", "decentralized", {}),
    Method("decentralized ring, 8 bits", "low_precision_decentralized", {}),
    Method("async_average H 8", "async_average", {}),
    Method("PowerSGD rank 1", "powersgd", {"rank": 1}),
    Method("all-reduce fp32, Muon", "allreduce", {}, muon=True),
    Method("ef_gradients .015, Muon", "ef_gradients", {}, muon=True),
    Method("DiLoCo H 30, Muon", "diloco", {}, muon=True),
    Method("SparseLoCo H 30, Muon", "sparse_loco", {}, muon=True),
    Method("DeMo, all kept", "demo", {"kept": 4096}),
    Method("ef_updates p.125, at once", "ef_updates", {"delayed": False}),
    Method("ef_updates p1", "ef_updates", {"subset": 1.0}),
    Method("ef_gradients .1", "ef_gradients", {"fraction": 0.1}),
    _cocktail("cocktail p.3 k.3 b4", 0.3, 0.3),
    Method("all-reduce bf16", "allreduce", {"format": "bf16"}),
)
METHOD_LABELS = tuple(method.label for method in METHODS)
_QUICK = METHOD_LABELS[:19]
LOSSES = ("held out", "last quarter", "tuned text")
_COLUMNS = {
    "x fp32 ring": ".1f",
    "x bf16 ring": ".1f",
    "held out": ".4f",
    **{f"{name} gap": "+.4f" for name in LOSSES},
    "B/parameter": ".1f",
    "ns/parameter": ".1f",
}


class Case(NamedTuple):
    """One run, from the pretrained weights in the file `base`."""

    setting: Setting
    texts: tuple[Path, ...]
    base: Path
    method: Method
    replicas: int
    lr: float
    seed: int


def compare(
    cases: Sequence[Case], methods: Sequence[Method], *, jobs: int, records: Records
) -> list[Row]:
    """Run the methods in every case, `jobs` at a time; prints and records a row for each.

    Gaps are losses above all-reduce's: of the global model, of every replica's own parameters in
    the last quarter of the steps, and of the global model on the text that it was tuned on. Time is
    in nanoseconds of processor time per parameter, step and replica, without the optimizer.
    """
    runs = [case._replace(method=method) for case in cases for method in methods]
    costs = {
        (method.label, size): cpu_ns(method, size)
        for size in dict.fromkeys(case.replicas for case in cases)
        for method in methods
    }
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for case, row in zip(runs, pool.map(run_case, runs), strict=True):
            cost = costs[case.method.label, case.replicas]
            full = replace(row, numbers={**row.numbers, "ns/parameter": cost})
            rows.append(with_gaps(full, rows, BASELINE, LOSSES))
            settings = {"setting": asdict(case.setting), "method": asdict(case.method)}
            records.add(settings, rows[-1])
            print(rows[-1], flush=True)
    return rows


def run_case(case: Case) -> Row:
    """Train."""
    return train(
        read_corpus(case.setting, case.texts),
        case.method,
        replace(case.setting, scale=replace(case.setting.scale, lr=case.lr)),
        replicas=case.replicas,
        weights=torch.load(case.base),
        seed=case.seed,
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """How far the global model ends above all-reduce's, by ratio; a mark for each run."""
    labels = dict.fromkeys(row.method for row in rows)
    height = max(3.8, 0.4 + 0.18 * len(labels))  # the legend's
    figure = Figure(figsize=(8.0, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    colors = [INK, *SERIES]
    for index, label in enumerate(labels):
        found = [row for row in rows if row.method == label]
        places = [
            (row.numbers["x fp32 ring"] or 0.0, row.numbers["held out gap"] or 0.0) for row in found
        ]
        axes.plot(
            *map(list, zip(*places, strict=True)),
            "osD^v"[index // len(colors) % 5],
            color=colors[index % len(colors)],
            label=label,
        )
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than an fp32 ring all-reduce")
    axes.set_ylabel("held-out loss above all-reduce [nats/token]")
    axes.grid(color=GRID)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    options = _parse(arguments)
    labels = with_baseline(options.methods, BASELINE)
    methods = [method for label in labels for method in METHODS if method.label == label]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    setting = shortened(SETTINGS[options.setting], options.share)
    with TemporaryDirectory() as folder:
        base = options.base or Path(folder) / "base.pt"
        if not base.exists():
            _pretrain(setting, options.text, base)
        cases = [
            Case(setting, tuple(options.text), base, methods[0], replicas, lr, seed)
            for replicas in options.replicas
            for lr in options.lr or [setting.scale.lr]
            for seed in seeds
        ]
        torch.set_num_threads(1)
        rows = compare(cases, methods, jobs=options.jobs, records=Records(options.json))
    print(f"\n{summary(rows, _COLUMNS)}")
    if options.plot is not None:
        draw(rows, options.plot)


def _pretrain(setting: Setting, texts: Sequence[Path], base: Path) -> None:
    start = time.perf_counter()
    torch.save(pretrain(read_corpus(setting, texts), setting.scale, seed=0), base)
    print(f"pretrained in {time.perf_counter() - start:.0f} s", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.replicas.parity", __doc__)
    command.add_argument(
        "--text",
        type=Path,
        nargs="*",
        default=[],
        help="two files; without them, sources of Python's standard library",
    )
    command.add_argument("--base", type=Path, help="pretrained weights; saved there if it is new")
    command.add_argument("--setting", choices=sorted(SETTINGS), default=GPT2.name)
    command.add_argument("--share", type=float, default=1.0, help="of the steps (default 1)")
    command.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    command.add_argument("--first-seed", type=int, default=0, help="of the repetitions (default 0)")
    command.add_argument("--replicas", type=int, nargs="+", default=[4])
    command.add_argument("--lr", type=float, nargs="+", help="peak learning rates of all-reduce")
    command.add_argument(
        "--methods", nargs="+", choices=METHOD_LABELS, default=METHOD_LABELS, metavar="NAME"
    )
    command.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    command.add_argument("--plot", type=Path, help="PNG of losses by ratio")
    quick = {"methods": list(_QUICK), "seeds": 1, "share": 0.25}
    return parse_options(command, arguments, "quick", quick)


if __name__ == "__main__":
    main()
