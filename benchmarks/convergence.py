"""Does a model learn as well across compressed cuts? Fine-tuning by AQ-SGD and its baselines.

    python -m benchmarks.convergence --train valid.txt --eval test.txt --seeds 3 --json out.jsonl

For every seed a byte-level decoder is pretrained, uncompressed, on the first nine tenths of the
training text. From these weights every method fine-tunes a copy for some epochs on a fixed set of
sequences from the last tenth, with every layer a stage of its own, all stages in one process
(`launch.inprocess`: boundaries, messages and bytes are those of a run over a network). The seed
sets the initial weights and the order of the data.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence_report import BASELINE, Outcome, draw, per_seed_table, summary_table
from benchmarks.finetuning import Corpus, Scale, fine_tune, pretrain, read_corpus
from benchmarks.harness import Records


def _method(kind: str, forward: int, backward: int, **options: Any) -> dict[str, Any]:
    return {
        "forward": {"kind": kind, "bits": forward, **options},
        "backward": {"kind": "direct", "bits": backward},
    }


def _cast(name: str) -> dict[str, Any]:
    return {way: {"kind": "raw", "format": name} for way in ("forward", "backward")}


METHODS: dict[str, dict[str, Any]] = {
    BASELINE: _cast("fp32"),
    "bf16": _cast("bf16"),
    "aq fw4/bw8": _method("aqsgd", 4, 8),
    "aq fw3/bw6": _method("aqsgd", 3, 6),
    "aq fw3/bw6, first fp32": _method("aqsgd", 3, 6, first_visit="fp32"),
    "aq fw2/bw4": _method("aqsgd", 2, 4),
    "direct fw4/bw8": _method("direct", 4, 8),
    "direct fw3/bw6": _method("direct", 3, 6),
    "direct fw2/bw4": _method("direct", 2, 4),
}


def compare(
    corpus: Corpus, scale: Scale, *, methods: Sequence[str], seeds: int, records: Records
) -> list[Outcome]:
    """Fine-tune with every method for every seed, the baseline first; prints one line for each."""
    outcomes: list[Outcome] = []
    for seed in range(seeds):
        start = time.perf_counter()
        weights = pretrain(corpus, scale, seed=seed)
        print(f"seed {seed}: pretrained in {time.perf_counter() - start:.0f} s", flush=True)
        for method in dict.fromkeys([BASELINE, *methods]):
            config = scale.run(METHODS[method], seed)
            outcome = fine_tune(corpus, config, weights, method=method)
            outcomes.append(outcome)
            records.add({"scale": asdict(scale), "run": config.shared()}, asdict(outcome))
            print(
                f"seed {seed}: {method}: train {outcome.final_loss:.4f}, "
                f"held out {outcome.held_out:.4f}, "
                + "".join(f"{name} {value:.3f}, " for name, value in outcome.scores.items())
                + f"{outcome.seconds:.0f} s",
                flush=True,
            )
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    scale = Scale(
        epochs=options.epochs,
        lr=options.lr,
        pretrain_steps=options.pretrain_steps,
        task="language" if options.labelled is None else "classification",
        dropout=options.dropout,
        dropout_masks=options.dropout_masks,
    )
    outcomes = compare(
        read_corpus(options.train, options.eval, scale, labelled=options.labelled),
        scale,
        methods=options.methods,
        seeds=options.seeds,
        records=Records(options.json),
    )
    print(f"\n{summary_table(outcomes)}\n\n{per_seed_table(outcomes)}")
    if options.plot is not None:
        draw(outcomes, options.plot)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description="Fine-tune across compressed cuts: AQ-SGD, direct quantization, no compression",
    )
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--eval", type=Path, required=True, help="held-out text")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epochs", type=int, default=Scale.epochs, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=Scale.lr, help="peak rate of fine-tuning")
    parser.add_argument("--pretrain-steps", type=int, default=Scale.pretrain_steps)
    parser.add_argument(
        "--labelled",
        nargs=2,
        type=Path,
        metavar=("TRAIN.TSV", "DEV.TSV"),
        help="fine-tune as a classifier of sentences in CoLA's columns",
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="of fine-tuning")
    parser.add_argument("--dropout-masks", choices=("random", "repeated"), default="random")
    parser.add_argument("--json", type=Path, help="new file for one JSON line per run")
    parser.add_argument("--plot", type=Path, help="PNG of the training loss by epoch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
