"""Loss of fine-tuning across compressed cuts: AQ-SGD and its baselines.

    python -m benchmarks.fidelity.convergence --train valid.txt --eval test.txt --seeds 3 \
        --json out.jsonl
    python -m benchmarks.fidelity.convergence --train valid.txt --eval test.txt --methods beyond \
        --seeds 3

For every seed a byte-level decoder is pretrained, uncompressed, on the first nine tenths of the
training text. From these weights every method fine-tunes a copy for some epochs on a fixed set of
sequences from the last tenth, with every layer a stage of its own, all in one process
(`benchmarks/single_process.py`: boundaries, messages and bytes are those of a run over a network).
The seed sets the initial weights and the order of the data.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.fidelity.finetuning import Corpus, Scale, fine_tune, pretrain, read_corpus
from benchmarks.harness import (
    Records,
    Row,
    command_line,
    parse_options,
    summary,
    with_baseline,
    with_gaps,
)

BASELINE = "fp32"
LOSSES = ("loss", "held out", "held out, compressed")
_COLUMNS = {
    "bits forward": ".2f",
    "bits backward": ".2f",
    "x fp32": ".1f",
    "x fp32, whole run": ".1f",
    "loss": ".4f",
    **{f"{name} gap": "+.4f" for name in LOSSES},
    "MB of epoch 1": ".1f",
    "MB of the last": ".1f",
    "change, epoch 2": ".3f",
    "change, last": ".3f",
}


def _published(kind: str) -> dict[str, Any]:
    """AQ-SGD without tiles, as the rows of results pages are."""
    return {"delta": "uniform", "first_visit": 8} if kind == "aqsgd" else {}


def _method(
    kind: str, forward: int, backward: int, *, gradients: str = "direct", **options: Any
) -> dict[str, Any]:
    return {
        "forward": {"kind": kind, "bits": forward, **_published(kind), **options},
        "backward": {"kind": gradients, "bits": backward},
    }


def _cast(name: str) -> dict[str, Any]:
    return {way: {"kind": "raw", "format": name} for way in ("forward", "backward")}


PAPER: dict[str, dict[str, Any]] = {
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
BEYOND: dict[str, dict[str, Any]] = {
    "aq fw3/bw6, first tiles 5": _method(
        "aqsgd", 3, 6, first_visit={"kind": "stateless", "bits": 5}
    ),
    "aq fw3/bw6, memory 8": _method("aqsgd", 3, 6, memory=8),
    "aq fw3/bw6, memory 4": _method("aqsgd", 3, 6, memory=4),
    "aq fw3/bw6, tiles": _method("aqsgd", 3, 6, delta="tiles", gradients="stateless"),
    "aq fw3/bw6, defaults": {
        "forward": {"kind": "aqsgd", "bits": 3},
        "backward": {"kind": "direct", "bits": 6},
    },
    "aq fw2/bw4, tiles": _method("aqsgd", 2, 4, delta="tiles", gradients="stateless"),
    "stateless fw6/bw6": _method("stateless", 6, 6, gradients="stateless"),
    "stateless fw4/bw6": _method("stateless", 4, 6, gradients="stateless"),
}


def _transform(
    forward: float,
    backward: float,
    *,
    largest: tuple[float, float] | None = None,
    dimensions: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Any]:
    spec = {"kind": "transform"}
    first = (0.05, 0.15)
    steps = zip((forward, backward), first, largest or (None, None), dimensions, strict=True)
    names = ("step", "first_step", "largest_step", "dimensions")
    ways = [spec | dict(zip(names, step, strict=True)) for step in steps]
    return {"forward": ways[0], "backward": ways[1]}


def _once(forward: float, backward: float) -> dict[str, Any]:
    """For a single epoch: without memories."""
    steps = zip(("forward", "backward"), (forward, backward), strict=True)
    return {way: {"kind": "transform", "memory": False, "first_step": step} for way, step in steps}


_STEPS = {".3": 0.3, ".4": 0.4, ".6": 0.6, ".7": 0.7, ".8": 0.8, ".9": 0.9, "1": 1.0}
TRANSFORM: dict[str, dict[str, Any]] = {
    **{f"transform {name}/{name}": _transform(step, step) for name, step in _STEPS.items()},
    "transform .7/.7, dimensions .875/.6": _transform(0.7, 0.7, dimensions=(0.875, 0.6)),
    "transform 1/2": _transform(1.0, 2.0),
    "transform 2/4, largest .25/.75": _transform(2.0, 4.0, largest=(0.25, 0.75)),
    "transform 1.5/3, largest .3/.9": _transform(1.5, 3.0, largest=(0.3, 0.9)),
}
ONCE: dict[str, dict[str, Any]] = {
    "tiles 5/4": _method("stateless", 5, 4, gradients="stateless"),
    "transform once .05/.15": _once(0.05, 0.15),
    "transform once .1/.3": _once(0.1, 0.3),
}
GPT2 = Scale(
    layers=8,
    width=256,
    heads=4,
    tokens=128,
    vocab=4096,
    pretrain_steps=400,
    pretrain_batch=8,
    pretrain_lr=1e-3,
    sequences=240,
    epochs=4,
    batch=8,
    held_out=128,
    stages=4,
)
"""GPT-2's shape with subwords, in four stages."""
SETTINGS = {"bytes": Scale(), "gpt2": GPT2}
_QUICK = ("aq fw2/bw4, tiles", "transform .6/.6", "transform .8/.8")
METHODS = {**PAPER, **BEYOND, **TRANSFORM, **ONCE}
_SIZES = {
    "layers": "of the model, each a stage",
    "width": "of the model",
    "tokens": "per sequence",
    "vocab": "size: 256 for bytes; more for learned subwords",
    "sequences": "to fine-tune on",
    "batch": "of fine-tuning, in sequences",
    "epochs": "of fine-tuning",
    "pretrain_steps": "of pretraining",
}
GROUPS = {
    "once": list(ONCE),
    "paper": list(PAPER),
    "beyond": list(BEYOND),
    "transform": list(TRANSFORM),
}


def compare(
    corpus: Corpus,
    scale: Scale,
    *,
    methods: Sequence[str],
    seeds: Iterable[int],
    records: Records,
    rates: Sequence[float] = (),
) -> list[Row]:
    """Fine-tune with every method for every seed and rate, the baseline first.

    Prints one line for each. By default the scale's own rate is the only one.
    """
    rows: list[Row] = []
    for seed in seeds:
        start = time.perf_counter()
        weights = pretrain(corpus, scale, seed=seed)
        print(f"seed {seed}: pretrained in {time.perf_counter() - start:.0f} s", flush=True)
        for at in [replace(scale, lr=rate) for rate in rates or [scale.lr]]:
            for method in methods:
                config = at.run(METHODS[method], seed)
                found = fine_tune(corpus, config, weights, method=method)
                rows.append(with_gaps(found, rows, BASELINE, LOSSES))
                records.add({"scale": asdict(at), "run": config.shared()}, rows[-1])
                print(rows[-1], flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Losses are in nats, of training in the last epoch; `gap` is to the baseline's.

    Bits are per value in all epochs but the first, headers included, and so is `x fp32`: how many
    times fewer bytes. Other metrics are those of held-out samples.
    """
    known = {*_COLUMNS, *LOSSES, "before"}
    scores = {name: ".3f" for row in rows for name in row.numbers if name not in known}
    return summary(rows, _COLUMNS | scores)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    setting = SETTINGS[options.setting]
    given["sequences"] = int(options.share * given.get("sequences", setting.sequences))
    scale = replace(
        setting,
        **given,
        dropout=options.dropout,
        dropout_masks=options.dropout_masks,
    )
    named = [m for name in options.methods for m in GROUPS.get(name, [name])]
    rows = compare(
        read_corpus(options.train, options.eval, scale),
        scale,
        methods=with_baseline(named, BASELINE),
        seeds=range(options.first_seed, options.first_seed + options.seeds),
        records=Records(options.json),
        rates=options.lr or (),
    )
    print(f"\n{table(rows)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.fidelity.convergence", __doc__)
    command.add_argument("--train", type=Path, required=True, help="text to train on")
    command.add_argument("--eval", type=Path, required=True, help="held-out text")
    command.add_argument(
        "--setting", choices=sorted(SETTINGS), default="bytes", help="a small decoder, or GPT-2's"
    )
    command.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    command.add_argument("--first-seed", type=int, default=0, help="of the repetitions (default 0)")
    command.add_argument(
        "--methods",
        nargs="+",
        choices=[*GROUPS, *METHODS],
        default=["paper"],
        help="of the paper (default), beyond it, transforms, for one epoch, or by name",
    )
    for name, meaning in _SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, type=int, help=f"{meaning} (default: the setting's)")
    command.add_argument("--lr", type=float, nargs="+", help="peak rates of fine-tuning")
    command.add_argument("--dropout", type=float, default=0.0, help="of fine-tuning")
    command.add_argument("--dropout-masks", choices=("random", "repeated"), default="random")
    command.add_argument("--share", type=float, default=1.0, help="of --sequences (default 1)")
    quick = {"methods": list(_QUICK), "seeds": 1, "share": 0.5, "epochs": 4}
    return parse_options(command, arguments, "quick", quick)


if __name__ == "__main__":
    main()
