"""Does a model learn as well when replicas exchange a hundred times less? Methods side by side.

    python -m benchmarks.replicas.parity --text valid.txt test.txt --seeds 3 --json out.jsonl

Every method trains replicas of one model from the same weights on the same batches. What is
compared is the global model, the one a user would keep. Ratios are counted at the links. The model
(`benchmarks/replicas/settings.py`) is pretrained in one piece on the first text, once for all
seeds, which order the batches, and tuned by replicas on the second, in bf16 with fp32 weights.
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

from benchmarks.fidelity.finetuning import Scale, pretrain
from benchmarks.harness import (
    Records,
    Row,
    command_line,
    parse_options,
    summary,
    with_baseline,
    with_gaps,
)
from benchmarks.replicas.settings import GPT2, read_corpus, shortened
from benchmarks.replicas.training import Method, train

BASELINE = "all-reduce fp32"
_STREAMING = {"interval": 30, "fragments": 3, "overlap": 5, "mix": 0.5, "bits": 4, "bucket_mb": 2.0}

METHODS = (
    Method(BASELINE, "allreduce", {}),
    Method("cocktail p.1 k.2 b4", "cocktail", {"subset": 0.1, "topk": 0.2, "bits": 4}),
    Method("ef_gradients .03", "ef_gradients", {"fraction": 0.03}),
    Method("ef_gradients .015", "ef_gradients", {}),
    Method("ef_gradients .015, delayed", "ef_gradients", {"delayed": True}),
    Method("top-k .0082 bf16", "topk", {"fraction": 0.0082, "bits": 16}),
    Method("top-k .008 4 bits", "topk", {"fraction": 0.008, "bits": 4}),
    Method("DeMo k 32", "demo", {}),
    Method("DeMo k 24", "demo", {"kept": 24}),
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
)
METHOD_LABELS = tuple(method.label for method in METHODS)
_QUICK = METHOD_LABELS[:12]
LOSSES = ("held out", "last quarter")
_COLUMNS = {
    "x fp32 ring": ".1f",
    "held out": ".4f",
    **{f"{name} gap": "+.4f" for name in LOSSES},
    "B/parameter": ".1f",
}


class Case(NamedTuple):
    """One run, from the pretrained weights in the file `base`."""

    scale: Scale
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

    Gaps are losses above all-reduce's: of the global model, and of every replica's own parameters
    in the last quarter of the steps.
    """
    runs = [case._replace(method=method) for case in cases for method in methods]
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for case, row in zip(runs, pool.map(run_case, runs), strict=True):
            rows.append(with_gaps(row, rows, BASELINE, LOSSES))
            setting = {"name": "gpt2", **asdict(case.scale)}
            about = {"setting": setting, "method": asdict(case.method)}
            records.add(about, rows[-1])
            print(rows[-1], flush=True)
    return rows


def run_case(case: Case) -> Row:
    """Train."""
    return train(
        read_corpus(case.scale, case.texts),
        case.method,
        replace(case.scale, lr=case.lr),
        replicas=case.replicas,
        weights=torch.load(case.base),
        seed=case.seed,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    options = _parse(arguments)
    labels = with_baseline(options.methods, BASELINE)
    methods = [method for label in labels for method in METHODS if method.label == label]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    scale = shortened(GPT2, options.share)
    with TemporaryDirectory() as folder:
        base = options.base or Path(folder) / "base.pt"
        if not base.exists():
            _pretrain(scale, options.text, base)
        cases = [
            Case(scale, tuple(options.text), base, methods[0], replicas, lr, seed)
            for replicas in options.replicas
            for lr in options.lr or [scale.lr]
            for seed in seeds
        ]
        torch.set_num_threads(1)
        rows = compare(cases, methods, jobs=options.jobs, records=Records(options.json))
    print(f"\n{summary(rows, _COLUMNS)}")


def _pretrain(scale: Scale, texts: Sequence[Path], base: Path) -> None:
    start = time.perf_counter()
    torch.save(pretrain(read_corpus(scale, texts), scale, seed=0), base)
    print(f"pretrained in {time.perf_counter() - start:.0f} s", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.replicas.parity", __doc__)
    command.add_argument("--text", type=Path, nargs=2, required=True, help="to pretrain, to tune")
    command.add_argument("--base", type=Path, help="pretrained weights; saved there if it is new")
    command.add_argument("--share", type=float, default=1.0, help="of the steps (default 1)")
    command.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    command.add_argument("--first-seed", type=int, default=0, help="of the repetitions (default 0)")
    command.add_argument("--replicas", type=int, nargs="+", default=[4])
    command.add_argument("--lr", type=float, nargs="+", help="peak learning rates of all-reduce")
    command.add_argument(
        "--methods", nargs="+", choices=METHOD_LABELS, default=METHOD_LABELS, metavar="NAME"
    )
    command.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    quick = {"methods": list(_QUICK), "seeds": 1, "share": 0.25}
    return parse_options(command, arguments, "quick", quick)


if __name__ == "__main__":
    main()
