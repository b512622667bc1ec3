"""Both compressions at once: a Hugging Face GPT-2 fine-tuned by 2 replicas of 2 stages.

    python -m benchmarks.fidelity.end_to_end --train valid.txt --eval test.txt --tokenizer gpt2 \
        --out e2e

Everything runs through the command line. On the first seven tenths of the training
text a GPT-2 with random weights and the given tokenizer is trained without compression (2
processes) and exported. From that folder every method fine-tunes a copy on sequences of the rest
(4 processes); seeds set the order of the data. Each run has a TOML file and a run folder in
`--out`; finished runs are not repeated.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tomlkit
from matplotlib.figure import Figure

from benchmarks.harness import environment, format_table
from benchmarks.theme import GRID, INK, MUTED, SERIES
from thinpipe.launch.report.metrics import StepRecord, read_metrics

_RAW = {way: {"kind": "raw", "format": "fp32"} for way in ("forward", "backward")}
_AQ = {"forward": {"kind": "aqsgd", "bits": 3}, "backward": {"kind": "direct", "bits": 6}}
_EXACT = {"method": "allreduce"}


def _cocktail(**options: float) -> dict[str, Any]:
    """A fifth of the parameters per step, of which the largest fifth is sent."""
    return {"method": "cocktail", "cocktail": {"subset": 0.2, "topk": 0.2, "bits": 4, **options}}


BASELINE = "uncompressed"
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"boundary": [_RAW], "gradcomp": _EXACT},
    "AQ-SGD": {"boundary": [_AQ], "gradcomp": _EXACT},
    "CocktailSGD": {"boundary": [_RAW], "gradcomp": _cocktail()},
    "AQ-SGD + CocktailSGD": {"boundary": [_AQ], "gradcomp": _cocktail()},
    "the same after 40 exact steps": {"boundary": [_AQ], "gradcomp": _cocktail(warmup_steps=40)},
    "the same, a quarter sent": {"boundary": [_AQ], "gradcomp": _cocktail(subset=0.5, topk=0.5)},
    "the same at twice the rate": {"boundary": [_AQ], "gradcomp": _cocktail(), "rate": 2.0},
    "uncompressed at twice the rate": {"boundary": [_RAW], "gradcomp": _EXACT, "rate": 2.0},
    "AQ-SGD + ef_gradients": {"boundary": [_AQ], "gradcomp": {"method": "ef_gradients"}},
    "AQ-SGD + DeMo": {"boundary": [_AQ], "gradcomp": {"method": "demo"}},
    "AQ-SGD + DeMo, k 96": {
        "boundary": [_AQ],
        "gradcomp": {"method": "demo", "demo": {"kept": 96}},
    },
    "AQ-SGD + ef_updates": {"boundary": [_AQ], "gradcomp": {"method": "ef_updates"}},
    "AQ-SGD + ef_updates, at once": {
        "boundary": [_AQ],
        "gradcomp": {"method": "ef_updates", "ef_updates": {"delayed": False}},
    },
    "AQ-SGD + ef_updates, a quarter in turn": {
        "boundary": [_AQ],
        "gradcomp": {"method": "ef_updates", "ef_updates": {"subset": 0.25}},
    },
}
"""What differs from run to run; `rate` multiplies the learning rate."""


@dataclass(frozen=True)
class Scale:
    """Size of the experiment; batches are in sequences of `tokens`, over both replicas."""

    layers: int = 4
    width: int = 128
    tokens: int = 64
    pretrain_epochs: int = 2
    pretrain_batch: int = 16
    sequences: int = 320
    epochs: int = 6
    batch: int = 8
    lr: float = 5e-4
    held_out: int = 64


@dataclass(frozen=True)
class Texts:
    """Where text, tokenizer and results are."""

    train: Path
    held_out: Path
    tokenizer: Path
    out: Path


@dataclass(frozen=True)
class Epoch:
    """Losses in nats per token: of training as it went, and of held-out text after the epoch."""

    loss: float
    held_out: float
    held_out_compressed: float
    cut_nbytes: int
    cut_values: int
    sync_nbytes: int


@dataclass(frozen=True)
class Outcome:
    """One fine-tuning run."""

    method: str
    seed: int
    epochs: tuple[Epoch, ...]


def prepare(texts: Texts, scale: Scale) -> Path:
    """Divide the training text and pretrain on its first part; returns the model's folder."""
    model, config = texts.out / "model", texts.out / "config"
    if model.exists():
        return model
    config.mkdir(parents=True, exist_ok=True)
    for file in texts.tokenizer.iterdir():
        if file.suffix in (".json", ".txt"):
            shutil.copyfile(file, config / file.name)
    (config / "config.json").write_text(json.dumps(_architecture(config, scale)), encoding="utf-8")
    lines = texts.train.read_bytes().splitlines(keepends=True)
    (texts.out / "first.txt").write_bytes(b"".join(lines[: len(lines) * 7 // 10]))
    (texts.out / "rest.txt").write_bytes(b"".join(lines[len(lines) * 7 // 10 :]))
    run = {
        "model": {"config": str(config)},
        "data": _data(texts, scale, "first.txt", "all"),
        "pipeline": {"cuts": [], "replicas": 2, "microbatches": 2},
        "train": {
            "epochs": scale.pretrain_epochs,
            "batch_size": scale.pretrain_batch,
            "lr": 2e-3,
            "betas": [0.9, 0.95],
            "warmup_steps": 20,
        },
    }
    folder = _train(texts.out, "pretrain", run)
    _thinpipe("export", str(folder), str(model))
    return model


def fine_tune(texts: Texts, scale: Scale, model: Path, *, method: str, seed: int) -> Outcome:
    """Train a copy of the model in 4 processes, 2 stages by 2 replicas, and read its metrics."""
    settings = dict(METHODS[method])
    run = {
        "run": {"seed": seed},
        "model": {"pretrained": str(model)},
        "data": _data(texts, scale, "rest.txt", scale.sequences),
        "pipeline": {"cuts": [scale.layers // 2], "replicas": 2, "microbatches": 2},
        "train": {
            "epochs": scale.epochs,
            "batch_size": scale.batch,
            "lr": scale.lr * settings.pop("rate", 1.0),
            "warmup_steps": scale.sequences // scale.batch // 2,
            "decay": "linear",
        },
        **settings,
    }
    name = f"{re.sub('[^a-z0-9]+', '-', method.lower())}-{seed}"
    records = read_metrics(_train(texts.out, name, run) / "metrics.jsonl")
    return Outcome(method, seed, _epochs(records))


def _architecture(folder: Path, scale: Scale) -> dict[str, Any]:
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": scale.layers,
        "n_embd": scale.width,
        "n_head": 4,
        "n_positions": scale.tokens,
        "vocab_size": len(vocabulary),
        "bos_token_id": len(vocabulary) - 1,
        "eos_token_id": len(vocabulary) - 1,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


def _data(texts: Texts, scale: Scale, name: str, sequences: int | str) -> dict[str, Any]:
    return {
        "path": str(texts.out / name),
        "eval_path": str(texts.held_out),
        "tokenizer": "model",
        "sequence_length": scale.tokens,
        "train_sequences": sequences,
        "eval_sequences": scale.held_out,
    }


def _train(out: Path, name: str, run: Mapping[str, Any]) -> Path:
    """Train unless it is done already; an interrupted run starts from scratch.

    Raises:
        ValueError: it was done with other settings.
    """
    folder, file = out / "runs" / name, out / f"{name}.toml"
    place = {"name": name, "folder": str(folder), **run.get("run", {})}
    settings = tomlkit.dumps({**run, "run": place, "checkpoint": {"keep": 1}})
    if not (folder / "report.html").exists():
        shutil.rmtree(folder, ignore_errors=True)
        file.write_text(settings, encoding="utf-8")
        _thinpipe("train", str(file))
    elif file.read_text(encoding="utf-8") != settings:
        raise ValueError(
            f"{folder}: was run with the settings of {file}, which differ from the requested ones; "
            "remove the folder or use another --out"
        )
    return folder


def _thinpipe(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", "thinpipe.launch", *arguments], check=True, stdout=sys.stderr
    )


def _epochs(records: Sequence[StepRecord]) -> tuple[Epoch, ...]:
    """Sum up the steps of every epoch.

    Raises:
        RuntimeError: a step was skipped, so the run is not comparable.
    """
    skipped = [record.step for record in records if record.skipped]
    if skipped:
        raise RuntimeError(f"steps {skipped} were skipped; lower the learning rate")
    found = []
    for number in range(1, records[-1].epoch + 1):
        steps = [record for record in records if record.epoch == number]
        wire = [count for step in steps for count in step.wire]
        held_out = steps[-1].eval
        assert held_out is not None, "every epoch ends with an evaluation"
        found.append(
            Epoch(
                loss=fmean([s.loss for s in steps], [s.tokens for s in steps]),
                held_out=held_out["loss"],
                held_out_compressed=held_out["loss_compressed"],
                cut_nbytes=sum(count.nbytes for count in wire),
                cut_values=sum(count.values for count in wire),
                sync_nbytes=sum(step.sync_bytes for step in steps),
            )
        )
    return tuple(found)


def table(outcomes: Sequence[Outcome]) -> str:
    """One row per method: losses of the last epoch, differences to the same seed's baseline.

    Bytes are medians over seeds: those of coded messages differ.
    """
    heads = (
        *("method", "train loss", "to uncompressed, by seed", "held out", "held out, compressed"),
        *("MB across the cut", "to fp32", "MB between replicas", "to fp32", "together"),
    )
    return format_table(heads, [_row(outcomes, method) for method in _methods(outcomes)])


def epoch_table(outcomes: Sequence[Outcome]) -> str:
    """Training and held-out loss of every epoch, medians over seeds."""
    count = range(len(outcomes[0].epochs))
    rows = []
    for method in _methods(outcomes):
        for kind in ("loss", "held_out"):
            label = f"{method}, {'train' if kind == 'loss' else 'held out'}"
            rows.append([label, *(f"{_median(outcomes, method, kind, e):.4f}" for e in count)])
    return format_table(("method", *(f"epoch {e + 1}" for e in count)), rows)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Losses by epoch, and the difference of training loss to the baseline."""
    figure = Figure(figsize=(10.0, 3.8), dpi=110, layout="constrained")
    losses, above = figure.subplots(1, 2)
    methods, colors = _methods(outcomes), (INK, *SERIES, MUTED)
    widths = (4.5, 3.0, 2.0, *[1.0] * 5)  # curves that coincide stay visible
    for color, width, method in zip(colors, widths, methods, strict=False):
        epochs = range(len(outcomes[0].epochs))
        places = [e + 1 for e in epochs]
        train = [_median(outcomes, method, "loss", e) for e in epochs]
        held_out = [_median(outcomes, method, "held_out", e) for e in epochs]
        losses.plot(places, train, color=color, linewidth=width, label=method)
        losses.plot(places, held_out, "--", color=color, linewidth=width)
        for outcome in (o for o in outcomes if o.method == method and method != BASELINE):
            above.plot(places, _excess(outcomes, outcome), color=color, linewidth=width)
    losses.set_ylabel("loss [nats/token]; dashed: held out")
    above.set_ylabel("training loss above uncompressed")
    for axes in (losses, above):
        axes.set_xlabel("epoch")
        axes.grid(color=GRID)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def _row(outcomes: Sequence[Outcome], method: str) -> list[str]:
    found = [outcome for outcome in outcomes if outcome.method == method]
    raw = next(outcome for outcome in outcomes if outcome.method == BASELINE)
    cut, sync = (median(_total(o, field) for o in found) for field in ("cut_nbytes", "sync_nbytes"))
    raw_cut, raw_sync = 4 * _total(found[0], "cut_values"), _total(raw, "sync_nbytes")
    last = len(raw.epochs) - 1
    excess = [_excess(outcomes, outcome)[-1] for outcome in found]
    return [
        method,
        f"{_median(outcomes, method, 'loss', last):.4f}",
        ", ".join(f"{value:+.4f}" for value in excess),
        f"{_median(outcomes, method, 'held_out', last):.4f}",
        f"{_median(outcomes, method, 'held_out_compressed', last):.4f}",
        f"{cut / 1e6:.1f}",
        f"{raw_cut / cut:.1f}x",
        f"{sync / 1e6:,.0f}",
        f"{raw_sync / sync:.1f}x",
        f"{(raw_cut + raw_sync) / (cut + sync):.1f}x",
    ]


def _methods(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.method for outcome in outcomes))


def _median(outcomes: Sequence[Outcome], method: str, field: str, epoch: int) -> float:
    return float(median(getattr(o.epochs[epoch], field) for o in outcomes if o.method == method))


def _excess(outcomes: Sequence[Outcome], outcome: Outcome) -> list[float]:
    """Training loss above the baseline with the same seed, by epoch."""
    base = next(o for o in outcomes if o.method == BASELINE and o.seed == outcome.seed)
    return [own.loss - raw.loss for own, raw in zip(outcome.epochs, base.epochs, strict=True)]


def _total(outcome: Outcome, field: str) -> int:
    return sum(int(getattr(epoch, field)) for epoch in outcome.epochs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing runs of the comparison and print the tables."""
    options = _parse(arguments)
    texts = Texts(options.train, options.eval, options.tokenizer, options.out.resolve())
    scale = Scale(
        pretrain_epochs=options.pretrain_epochs, sequences=options.sequences, epochs=options.epochs
    )
    model = prepare(texts, scale)
    outcomes = []
    for seed in range(options.seeds):
        for method in dict.fromkeys([BASELINE, *options.methods]):
            outcome = fine_tune(texts, scale, model, method=method, seed=seed)
            outcomes.append(outcome)
            last = outcome.epochs[-1]
            print(
                f"seed {seed}: {method}: train {last.loss:.4f}, held out {last.held_out:.4f}",
                flush=True,
            )
    print(f"\n{table(outcomes)}\n\n{epoch_table(outcomes)}\n\n{json.dumps(environment())}")
    if options.plot is not None:
        draw(outcomes, options.plot)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity.end_to_end",
        description="Fine-tune a Hugging Face GPT-2 with every link compressed, and without",
    )
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--eval", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="vocab.json and merges.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and runs")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--pretrain-epochs", type=int, default=Scale.pretrain_epochs)
    parser.add_argument("--sequences", type=int, default=Scale.sequences, help="to fine-tune on")
    parser.add_argument("--epochs", type=int, default=Scale.epochs, help="of fine-tuning")
    parser.add_argument("--plot", type=Path, help="PNG of the losses")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
