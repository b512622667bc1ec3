"""Does a model learn as well when replicas exchange a hundred times less? CocktailSGD and others.

    python -m benchmarks.replicas.parity --train valid.txt --tune test.txt --seeds 3 \
        --json out.jsonl

For every seed a byte-level decoder is pretrained on one text. From these weights every method
fine-tunes 4 replicas on sequences of another, whose last tenth is held out. What is compared is the
global model, the one a user would keep: for CocktailSGD the copy that all replicas share, not one
replica's own parameters. Ratios are counted at the links.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure

from benchmarks.fidelity.finetuning import Corpus, Scale, pretrain, sequences
from benchmarks.harness import Records, format_table
from benchmarks.replicas.training import Epoch, Method, Outcome, labels, train
from thinpipe.launch.report.theme import LIGHT

BASELINE = "all-reduce fp32"


def _cocktail(label: str, subset: float, topk: float, **options: object) -> Method:
    return Method(label, "cocktail", {"subset": subset, "topk": topk, "bits": 4, **options})


METHODS = (
    Method(BASELINE, "allreduce", {}),
    Method("all-reduce bf16", "allreduce", {"format": "bf16"}),
    _cocktail("cocktail p.3 k.3 b4", 0.3, 0.3),
    _cocktail("cocktail p.19 k.2 b4", 0.19, 0.2),
    _cocktail("cocktail p.1 k.2 b4", 0.1, 0.2),
    _cocktail("cocktail p.19 k.2 b4, no delay", 0.19, 0.2, delayed=False),
    Method("top-k .0082 bf16", "topk", {"fraction": 0.0082, "bits": 16}),
    Method("quantize 2 bits", "quantize", {"bits": 2}),
    Method("quantize 1 bit", "quantize", {"bits": 1}),
    Method("PowerSGD rank 1", "powersgd", {"rank": 1}),
)
_Loss = Callable[[Epoch], float]
_TUNED: _Loss = attrgetter("tuned")
_HELD_OUT: _Loss = attrgetter("held_out")
METHOD_LABELS = tuple(method.label for method in METHODS)


def chosen_methods(labels: Sequence[str] | None) -> list[Method]:
    """Those of the labels, by default all; the baseline, which they are compared with, is first."""
    wanted = [BASELINE, *(labels or METHOD_LABELS)]
    return [method for method in METHODS if method.label in wanted]


def read_texts(pretrained: Path, tuned: Path, scale: Scale) -> Corpus:
    """Cut a text to pretrain on and a text to fine-tune on into sequences.

    Raises:
        ValueError: a file is missing or too short.
    """
    first, _ = sequences(pretrained, scale, "all", 1)
    return Corpus(first, *sequences(tuned, scale, scale.sequences, scale.held_out))


def compare(
    corpus: Corpus,
    scale: Scale,
    methods: Sequence[Method],
    *,
    replicas: int,
    seeds: Iterable[int],
    records: Records,
) -> list[Outcome]:
    """Fine-tune with every method for every seed; prints one line for each."""
    outcomes = []
    for seed in seeds:
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
        *("held out", "to all-reduce", "tuned text", "to all-reduce", "while training"),
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
                *(text for loss in (_HELD_OUT, _TUNED) for text in _cells(outcomes, found, loss)),
                f"{median(outcome.epochs[-1].local for outcome in found):.4f}",
            ]
        )
    return format_table(heads, rows)


def _cells(outcomes: Sequence[Outcome], found: Sequence[Outcome], loss: _Loss) -> tuple[str, str]:
    """The loss of the global model, and by how much it is above the first method's."""
    excess = [_excess(outcomes, outcome, loss) for outcome in found]
    spread = f" ({min(excess):+.4f} to {max(excess):+.4f})" if len(excess) > 1 else ""
    return f"{median(loss(o.epochs[-1]) for o in found):.4f}", f"{median(excess):+.4f}{spread}"


def _excess(outcomes: Sequence[Outcome], outcome: Outcome, loss: _Loss) -> float:
    """Loss of the global model above the first method's with the same seed."""
    first = next(o for o in outcomes if o.seed == outcome.seed)
    return loss(outcome.epochs[-1]) - loss(first.epochs[-1])


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """How far the global model ends above the first method's, by ratio; a mark for each seed."""
    figure = Figure(figsize=(8.0, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    colors = [LIGHT.ink, *LIGHT.series]
    for index, label in enumerate(labels(outcomes)):
        found = [outcome for outcome in outcomes if outcome.method == label]
        ratios, excess = [o.ratio for o in found], [_excess(outcomes, o, _HELD_OUT) for o in found]
        mark = "o" if index < len(colors) else "D"
        axes.plot(ratios, excess, mark, color=colors[index % len(colors)], label=label)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than an fp32 ring all-reduce")
    axes.set_ylabel("held-out loss above all-reduce [nats/byte]")
    axes.grid(color=LIGHT.grid)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
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
    outcomes = compare(
        read_texts(options.train, options.tune, scale),
        scale,
        chosen_methods(options.methods),
        replicas=options.replicas,
        seeds=range(options.first_seed, options.first_seed + options.seeds),
        records=Records(options.json),
    )
    print(f"\n{table(outcomes)}")
    if options.plot is not None:
        draw(outcomes, options.plot)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas.parity",
        description="Fine-tune replicas that exchange little: loss of the global model by bytes",
    )
    parser.add_argument("--train", type=Path, required=True, help="text to pretrain on")
    parser.add_argument("--tune", type=Path, required=True, help="text to fine-tune on")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the repetitions (default 0)")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument(
        "--methods", nargs="+", choices=METHOD_LABELS, help=f"default: all; {BASELINE} always"
    )
    parser.add_argument("--sequences", type=int, default=8192, help="to fine-tune on")
    parser.add_argument("--epochs", type=int, default=1, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak rate of fine-tuning")
    parser.add_argument("--pretrain-steps", type=int, default=Scale.pretrain_steps)
    parser.add_argument("--json", type=Path, help="new file for one JSON line per run")
    parser.add_argument("--plot", type=Path, help="PNG of losses by ratio")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
