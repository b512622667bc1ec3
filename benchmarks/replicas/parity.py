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
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks.fidelity.finetuning import pretrain
from benchmarks.harness import Records, format_table, parse_options
from benchmarks.replicas.cost import cpu_ns
from benchmarks.replicas.settings import GPT2, SETTINGS, Setting, quick, read_corpus
from benchmarks.replicas.training import Method, Outcome, train
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


class Case(NamedTuple):
    """One run, from the pretrained weights in the file `base`."""

    setting: Setting
    texts: tuple[Path, ...]
    base: Path
    method: Method
    replicas: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Row:
    """One method with one seed; gaps are losses above all-reduce's, at its learning rate.

    `train_gap` is that of the last quarter of the steps, in which every replica's loss is that of
    its own parameters; `tuned_gap` that of the global model on the text it was tuned on, where that
    is evaluated. State is in bytes per parameter beside weights and gradients, time in nanoseconds
    of processor time per parameter, step and replica, without the optimizer.
    """

    method: str
    replicas: int
    lr: float
    seed: int
    ratio_fp32: float
    ratio_bf16: float
    held_out: float
    held_out_gap: float
    train_gap: float
    tuned_gap: float | None
    state_bytes: float
    cpu_ns: float


def chosen_methods(labels: Sequence[str] | None) -> list[Method]:
    """Those of the labels, by default all; the baseline, which they are compared with, is first."""
    wanted = [BASELINE, *(labels or METHOD_LABELS)]
    return [method for method in METHODS if method.label in wanted]


def compare(
    cases: Sequence[Case], methods: Sequence[Method], *, jobs: int, records: Records
) -> list[Row]:
    """Run the methods in every case, `jobs` at a time; prints and records a row for each."""
    runs = [case._replace(method=method) for case in cases for method in methods]
    costs = {
        (method.label, size): cpu_ns(method, size)
        for size in dict.fromkeys(case.replicas for case in cases)
        for method in methods
    }
    rows: list[Row] = []
    first: dict[tuple[int, float, int], Outcome] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for case, outcome in zip(runs, pool.map(run_case, runs), strict=True):
            baseline = first.setdefault((case.replicas, case.lr, case.seed), outcome)
            row = _row(outcome, baseline, costs[case.method.label, case.replicas])
            rows.append(row)
            setting = {"setting": asdict(case.setting), "method": asdict(case.method)}
            records.add(setting, asdict(row) | {"outcome": asdict(outcome)})
            print(row, f"{outcome.seconds:.0f} s", flush=True)
    return rows


def run_case(case: Case) -> Outcome:
    """Train."""
    return train(
        read_corpus(case.setting, case.texts),
        case.method,
        replace(case.setting, scale=replace(case.setting.scale, lr=case.lr)),
        replicas=case.replicas,
        weights=torch.load(case.base),
        seed=case.seed,
    )


def _row(outcome: Outcome, baseline: Outcome, nanoseconds: float) -> Row:
    last, other = outcome.epochs[-1], baseline.epochs[-1]
    tuned = None
    if last.tuned is not None and other.tuned is not None:
        tuned = last.tuned - other.tuned
    return Row(
        method=outcome.method,
        replicas=outcome.replicas,
        lr=outcome.lr,
        seed=outcome.seed,
        ratio_fp32=outcome.ratio,
        ratio_bf16=outcome.ratio / 2,
        held_out=last.held_out,
        held_out_gap=last.held_out - other.held_out,
        train_gap=last.last_quarter - other.last_quarter,
        tuned_gap=tuned,
        state_bytes=outcome.state_nbytes,
        cpu_ns=nanoseconds,
    )


def table(rows: Sequence[Row]) -> str:
    """A line per method, number of replicas and rate: medians over seeds, and the range of gaps."""
    heads = (
        *("method", "replicas", "lr", "vs fp32 ring", "vs bf16 ring", "held out"),
        *("to all-reduce", "last quarter", "tuned text", "B/parameter", "ns/parameter"),
    )
    lines = []
    for group in dict.fromkeys((row.method, row.replicas, row.lr) for row in rows):
        found = [row for row in rows if (row.method, row.replicas, row.lr) == group]
        tuned = [row.tuned_gap for row in found if row.tuned_gap is not None]
        lines.append(
            [
                group[0],
                str(group[1]),
                f"{group[2]:g}",
                f"{median(row.ratio_fp32 for row in found):.1f}x",
                f"{median(row.ratio_bf16 for row in found):.1f}x",
                f"{median(row.held_out for row in found):.4f}",
                _spread([row.held_out_gap for row in found]),
                _spread([row.train_gap for row in found]),
                _spread(tuned) if tuned else "-",
                f"{median(row.state_bytes for row in found):.1f}",
                f"{median(row.cpu_ns for row in found):.1f}",
            ]
        )
    return format_table(heads, lines)


def _spread(gaps: Sequence[float]) -> str:
    spread = f" ({min(gaps):+.4f} to {max(gaps):+.4f})" if len(gaps) > 1 else ""
    return f"{median(gaps):+.4f}{spread}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """How far the global model ends above all-reduce's, by ratio; a mark for each run."""
    labels = dict.fromkeys(row.method for row in rows)
    height = max(3.8, 0.4 + 0.18 * len(labels))  # the legend's
    figure = Figure(figsize=(8.0, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    colors = [INK, *SERIES]
    for index, label in enumerate(labels):
        found = [row for row in rows if row.method == label]
        axes.plot(
            [row.ratio_fp32 for row in found],
            [row.held_out_gap for row in found],
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
    setting = SETTINGS[options.setting]
    methods = chosen_methods(options.methods)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.quick:
        setting = quick(setting)
        print(f"--quick: {setting.steps} steps instead of {SETTINGS[options.setting].steps}")
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
    print(f"\n{table(rows)}")
    if options.plot is not None:
        draw(rows, options.plot)


def _pretrain(setting: Setting, texts: Sequence[Path], base: Path) -> None:
    start = time.perf_counter()
    torch.save(pretrain(read_corpus(setting, texts), setting.scale, seed=0), base)
    print(f"pretrained in {time.perf_counter() - start:.0f} s", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas.parity",
        description="Train replicas that exchange little: loss of the global model by bytes",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="*",
        default=[],
        help="two files; without them, sources of Python's standard library",
    )
    parser.add_argument("--base", type=Path, help="pretrained weights; saved there if it is new")
    parser.add_argument("--setting", choices=sorted(SETTINGS), default=GPT2.name)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a quarter of the steps; fewer methods, one seed, but for what is given",
    )
    parser.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the repetitions (default 0)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4])
    parser.add_argument("--lr", type=float, nargs="+", help="peak learning rates of all-reduce")
    parser.add_argument(
        "--methods", nargs="+", choices=METHOD_LABELS, help=f"default: all; {BASELINE} always"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--json", type=Path, help="new file for one JSON line per run")
    parser.add_argument("--plot", type=Path, help="PNG of losses by ratio")
    return parse_options(
        parser, arguments, "quick", lambda _: {"methods": list(_QUICK), "seeds": 1}
    )


if __name__ == "__main__":
    main()
