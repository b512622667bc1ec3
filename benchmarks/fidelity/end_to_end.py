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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tomlkit
from matplotlib.figure import Figure

from benchmarks.fidelity.report import LOSSES, epoch_losses
from benchmarks.harness import Records, Row, command_line, summary, with_baseline, with_gaps
from benchmarks.theme import GRID, INK, MUTED, SERIES
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

_RAW = {way: {"kind": "raw", "format": "fp32"} for way in ("forward", "backward")}
_AQ = {
    "forward": {"kind": "aqsgd", "bits": 3, "delta": "uniform", "first_visit": 8},
    "backward": {"kind": "direct", "bits": 6},
}
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


def fine_tune(texts: Texts, scale: Scale, model: Path, *, method: str, seed: int) -> Row:
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
    return make_row(method, seed, _epochs(records))


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


def _epochs(records: Sequence[StepRecord]) -> list[dict[str, float]]:
    """Sum up the steps of every epoch: losses in nats per token, bytes, values over the cut.

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
            {
                "loss": fmean([s.loss for s in steps], [s.tokens for s in steps]),
                "held out": held_out["loss"],
                "held out, compressed": held_out["loss_compressed"],
                "cut bytes": sum(count.nbytes for count in wire),
                "cut values": sum(count.values for count in wire),
                "sync bytes": sum(step.sync_bytes for step in steps),
            }
        )
    return found


def make_row(method: str, seed: int, epochs: Sequence[Mapping[str, float]]) -> Row:
    """Losses of the last epoch; bytes of all."""
    cut, values, sync = (
        sum(epoch[name] for epoch in epochs) for name in ("cut bytes", "cut values", "sync bytes")
    )
    numbers = {
        **{name: epochs[-1][name] for name in LOSSES},
        "MB across the cut": cut / 1e6,
        "cut x fp32": 4 * values / cut,
        "MB between replicas": sync / 1e6,
    }
    detail = {"epochs": epochs, "raw": 4 * values / 1e6}
    return Row(method, numbers, seed=seed, detail=detail)


def beside(row: Row, rows: Sequence[Row]) -> Row:
    """The row with its gaps to the baseline with the same seed, and its ratios of bytes."""
    found = with_gaps(row, rows, BASELINE, LOSSES)
    base = next(r for r in (*rows, row) if (r.method, r.seed) == (BASELINE, row.seed))
    cut, sync, raw_sync = (
        number or 0.0
        for number in (
            row.numbers["MB across the cut"],
            row.numbers["MB between replicas"],
            base.numbers["MB between replicas"],
        )
    )
    ratios = {
        "replicas x fp32": raw_sync / sync,
        "together": (row.detail["raw"] + raw_sync) / (cut + sync),
    }
    return replace(found, numbers={**found.numbers, **ratios})


def table(rows: Sequence[Row]) -> str:
    """One row per method: losses of the last epoch, differences to the same seed's baseline."""
    columns = {"loss": ".4f", **{f"{name} gap": "+.4f" for name in LOSSES}}
    columns |= {"MB across the cut": ".1f", "cut x fp32": ".1f"}
    columns |= {"MB between replicas": ".1f", "replicas x fp32": ".1f", "together": ".1f"}
    return summary(rows, columns)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Losses by epoch, and the difference of training loss to the baseline."""
    figure = Figure(figsize=(10.0, 3.8), dpi=110, layout="constrained")
    losses, above = figure.subplots(1, 2)
    colors = (INK, *SERIES, MUTED)
    widths = (4.5, 3.0, 2.0, *[1.0] * 5)  # curves that coincide stay visible
    methods = dict.fromkeys(row.method for row in rows)
    base = epoch_losses(rows, BASELINE)
    places = range(1, len(base) + 1)
    for color, width, method in zip(colors, widths, methods, strict=False):
        train = epoch_losses(rows, method)
        held_out = epoch_losses(rows, method, "held out")
        losses.plot(places, [*map(median, train)], color=color, linewidth=width, label=method)
        losses.plot(places, [*map(median, held_out)], "--", color=color, linewidth=width)
        for own, its in zip(zip(*train, strict=True), zip(*base, strict=True), strict=False):
            gaps = [a - b for a, b in zip(own, its, strict=True)]
            if method != BASELINE:
                above.plot(places, gaps, color=color, linewidth=width)
    losses.set_ylabel("loss [nats/token]; dashed: held out")
    above.set_ylabel("training loss above uncompressed")
    for axes in (losses, above):
        axes.set_xlabel("epoch")
        axes.grid(color=GRID)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing runs of the comparison and print the tables."""
    options = _parse(arguments)
    texts = Texts(options.train, options.eval, options.tokenizer, options.out.resolve())
    scale = Scale(
        pretrain_epochs=options.pretrain_epochs, sequences=options.sequences, epochs=options.epochs
    )
    model = prepare(texts, scale)
    records, rows = Records(options.json), list[Row]()
    for seed in range(options.seeds):
        for method in with_baseline(options.methods, BASELINE):
            rows.append(beside(fine_tune(texts, scale, model, method=method, seed=seed), rows))
            records.add({"scale": asdict(scale), "settings": METHODS[method]}, rows[-1])
            print(rows[-1], flush=True)
    print(f"\n{table(rows)}")
    if options.plot is not None:
        draw(rows, options.plot)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.fidelity.end_to_end", __doc__)
    command.add_argument("--train", type=Path, required=True, help="text to train on")
    command.add_argument("--eval", type=Path, required=True, help="held-out text")
    command.add_argument("--tokenizer", type=Path, required=True, help="vocab.json and merges.txt")
    command.add_argument("--out", type=Path, required=True, help="folder for models and runs")
    command.add_argument("--seeds", type=int, default=3, help="repetitions (default 3)")
    command.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    command.add_argument("--pretrain-epochs", type=int, default=Scale.pretrain_epochs)
    command.add_argument("--sequences", type=int, default=Scale.sequences, help="to fine-tune on")
    command.add_argument("--epochs", type=int, default=Scale.epochs, help="of fine-tuning")
    command.add_argument("--plot", type=Path, help="PNG of the losses")
    return command.parse_args(arguments)


if __name__ == "__main__":
    main()
