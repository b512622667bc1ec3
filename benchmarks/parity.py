"""Does a model learn as well when replicas exchange a hundred times less? CocktailSGD and others.

    python -m benchmarks.parity --train valid.txt --eval test.txt --seeds 3 --json out.jsonl

For every seed a byte-level decoder is pretrained on the first nine tenths of the training text.
From these weights every method fine-tunes 4 replicas on a fixed set of sequences from the last
tenth. What is compared is the global model, the one a user would keep: for CocktailSGD the copy
that all replicas share, not one replica's own parameters. Ratios are counted at the links.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure

from benchmarks.finetuning import Corpus, Scale, pretrain, read_corpus
from benchmarks.harness import Records, format_table
from benchmarks.replica_training import Method, Outcome, labels, train
from launch.plots import LIGHT

BASELINE = "all-reduce fp32"


def _cocktail(label: str, subset: float, topk: float, **options: object) -> Method:
    return Method(label, "cocktail", {"subset": subset, "topk": topk, "bits": 4, **options})


METHODS = (
    Method(BASELINE, "allreduce", {}),
    Method("all-reduce bf16", "allreduce", {"format": "bf16"}),
    _cocktail("cocktail p.3 k.3 b4", 0.3, 0.3),
    _cocktail("cocktail p.2 k.2 b4", 0.2, 0.2),
    _cocktail("cocktail p.1 k.2 b4", 0.1, 0.2),
    _cocktail("cocktail p.2 k.2 b4, no delay", 0.2, 0.2, delayed=False),
    Method("top-k .017 bf16", "topk", {"fraction": 0.017, "bits": 16}),
    Method("top-k .0082 bf16", "topk", {"fraction": 0.0082, "bits": 16}),
    Method("top-k .004 bf16", "topk", {"fraction": 0.004, "bits": 16}),
    Method("quantize 2 bits", "quantize", {"bits": 2}),
    Method("quantize 1 bit", "quantize", {"bits": 1}),
    Method("PowerSGD rank 1", "powersgd", {"rank": 1}),
    Method("PowerSGD rank 4", "powersgd", {"rank": 4}),
)
METHOD_LABELS = tuple(method.label for method in METHODS)


def compare(
    corpus: Corpus,
    scale: Scale,
    methods: Sequence[Method],
    *,
    replicas: int,
    seeds: int,
    records: Records,
) -> list[Outcome]:
    """Fine-tune with every method for every seed; prints one line for each."""
    outcomes = []
    for seed in range(seeds):
        start = time.perf_counter()
        weights = pretrain(corpus, scale, seed=seed)
        print(f"seed {seed}: pretrained in {time.perf_counter() - start:.0f} s", flush=True)
        for method in methods:
            outcome = train(corpus, method, scale, replicas=replicas, weights=weights, seed=seed)
            outcomes.append(outcome)
            setting = {"scale": asdict(scale), "replicas": replicas, "method": asdict(method)}
            records.add(setting, asdict(outcome))
            last = outcome.epochs[-1]
            print(
                f"seed {seed}: {method.label}: {outcome.ratio:.1f}x, global {last.tuned:.4f}, "
                f"held out {last.held_out:.4f}, local {last.local:.4f}, {outcome.seconds:.0f} s",
                flush=True,
            )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """One row per method: medians over seeds."""
    heads = (
        *("method", "vs fp32 ring", "vs bf16 ring", "bits/parameter/way"),
        *("global, tuned text", "to all-reduce", "global, held out", "local, last epoch"),
    )
    rows = []
    for label in labels(outcomes):
        found = [outcome for outcome in outcomes if outcome.method == label]
        ratio = median(outcome.ratio for outcome in found)
        rows.append(
            [
                label,
                f"{ratio:.1f}x",
                f"{ratio / 2:.1f}x",
                f"{32 / ratio:.3f}",
                f"{median(outcome.epochs[-1].tuned for outcome in found):.4f}",
                f"{median(_excess(outcomes, outcome) for outcome in found):+.4f}",
                f"{median(outcome.epochs[-1].held_out for outcome in found):.4f}",
                f"{median(outcome.epochs[-1].local for outcome in found):.4f}",
            ]
        )
    return format_table(heads, rows)


def _excess(outcomes: Sequence[Outcome], outcome: Outcome) -> float:
    """Loss of the global model above the first method's with the same seed."""
    first = next(o for o in outcomes if o.seed == outcome.seed)
    return outcome.epochs[-1].tuned - first.epochs[-1].tuned


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Loss of the global model by epoch, and how far it ends from the first method by ratio."""
    figure = Figure(figsize=(10.0, 3.8), dpi=110, layout="constrained")
    curves, ends = figure.subplots(1, 2)
    colors = [LIGHT.ink, *LIGHT.series]
    for index, label in enumerate(labels(outcomes)):
        found = [outcome for outcome in outcomes if outcome.method == label]
        color, style = colors[index % len(colors)], "-" if index < len(colors) else "--"
        epochs = range(len(found[0].epochs))
        losses = [median(o.epochs[epoch].tuned for o in found) for epoch in epochs]
        curves.plot([e + 1 for e in epochs], losses, style, color=color, label=label, linewidth=1.4)
        ratios, excess = [o.ratio for o in found], [_excess(outcomes, o) for o in found]
        ends.plot(ratios, excess, "o" if style == "-" else "D", color=color)
    curves.set_xlabel("epoch")
    curves.set_ylabel("loss of the global model [nats/byte]")
    ends.set_xscale("log")
    ends.set_xlabel("times fewer bytes than an fp32 ring")
    ends.set_ylabel("final loss above all-reduce")
    for axes in (curves, ends):
        axes.grid(color=LIGHT.grid)
    figure.legend(*curves.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    scale = Scale(
        layers=4,
        width=128,
        sequences=options.sequences,
        epochs=options.epochs,
        lr=options.lr,
        pretrain_steps=options.pretrain_steps,
    )
    chosen = [method for method in METHODS if method.label in (options.methods or METHOD_LABELS)]
    outcomes = compare(
        read_corpus(options.train, options.eval, scale),
        scale,
        chosen,
        replicas=options.replicas,
        seeds=options.seeds,
        records=Records(options.json),
    )
    print(f"\n{table(outcomes)}")
    if options.plot is not None:
        draw(outcomes, options.plot)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity",
        description="Fine-tune replicas that exchange little: loss of the global model by bytes",
    )
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--eval", type=Path, required=True, help="held-out text")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--methods", nargs="+", choices=METHOD_LABELS, help="default: all")
    parser.add_argument("--sequences", type=int, default=1024, help="to fine-tune on")
    parser.add_argument("--epochs", type=int, default=6, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=5e-4, help="peak rate of fine-tuning")
    parser.add_argument("--pretrain-steps", type=int, default=Scale.pretrain_steps)
    parser.add_argument("--json", type=Path, help="new file for one JSON line per run")
    parser.add_argument("--plot", type=Path, help="PNG of the losses")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
