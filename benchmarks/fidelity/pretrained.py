"""Loss of fine-tuning a real pretrained language model across compressed cuts.

    python -m benchmarks.fidelity.pretrained --model smollm2 --train valid.txt --eval test.txt \
        --json out.jsonl
    python -m benchmarks.fidelity.pretrained --model smollm2 --train valid.txt --eval test.txt \
        --json once.jsonl --epochs 1 --methods once
    python -m benchmarks.fidelity.pretrained --model smollm2 --train valid.txt --eval test.txt \
        --json small.jsonl --lora 16 --lr 5e-4 --methods small

`--model` is the folder of a Hugging Face model whose residual stream has massive activations, as
that of every Llama-like model has. All weights are trained (or `--lora` additions), in one process
(`benchmarks/single_process.py`: boundaries, messages and bytes are those of a run over a network).
Seeds set the order of the sequences. Group `small` has uncompressed cuts and smaller weights,
`optimizer` a smaller state. With `--labelled` files are CoLA's tables and the model learns
to tell sentences apart; rows then have `matthews` and `matthews_gap`, of held-out sentences sent
uncompressed.

Rows that FILE has already are not measured again, so a comparison may take several sittings. A row
has `method`, `seed`, `lr`, `cuts`, `epochs`, `lora`; `ratio_fp32` of the bytes from the second
epoch on and `ratio_fp32_run` of all; and gaps to uncompressed cuts in nats: `train_gap` of the last
epoch (`train_gaps`: of each), `held_out_gap` and `held_out_compressed_gap`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fidelity.finetuning import Corpus, fine_tune
from benchmarks.fidelity.tah_quant import TahQuant
from benchmarks.harness import (
    Records,
    Row,
    command_line,
    parse_options,
    summary,
    with_baseline,
)
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.load import load
from thinpipe.pipeline.wire.told import DIRECTIONS

BASELINE = "fp32"
_SCORE = "matthews"
_LOSSES = {
    "train_gap": "loss",
    "held_out_gap": "held out",
    "held_out_compressed_gap": "held out, compressed",
}
_COLUMNS = {
    "ratio_fp32": ".1f",
    "ratio_fp32_run": ".1f",
    **dict.fromkeys(_LOSSES, "+.4f"),
    _SCORE: ".3f",
    f"{_SCORE}_gap": "+.3f",
}
_KEY = ("method", "seed", "lr", "cuts", "epochs", "lora", "sequences", "batch", "warmup")
_USUAL = {"batch": 8, "warmup": 20}
_EVAL_BATCH = 16


def _both(forward: Mapping[str, Any], backward: Mapping[str, Any]) -> dict[str, Any]:
    return {"forward": dict(forward), "backward": dict(backward)}


def _transform(forward: float, backward: float) -> dict[str, Any]:
    return _both(*({"kind": "transform", "step": step} for step in (forward, backward)))


def _once(forward: float, backward: float) -> dict[str, Any]:
    ways = (
        {"kind": "transform", "memory": False, "first_step": step} for step in (forward, backward)
    )
    return _both(*ways)


_RAW = {"kind": "raw", "format": "fp32"}
_TAH_QUANT = "tah-quant fw4/bw4"
AGAIN: dict[str, dict[str, Any]] = {
    "aqsgd 3/6": _both({"kind": "aqsgd", "bits": 3}, {"kind": "direct", "bits": 6}),
    "stateless 5/4": _both({"kind": "stateless", "bits": 5}, {"kind": "stateless", "bits": 4}),
    "transform .3/.3": _transform(0.3, 0.3),
    "transform .7/.9": _transform(0.7, 0.9),
}
ONCE: dict[str, dict[str, Any]] = {
    "stateless 5/4": AGAIN["stateless 5/4"],
    _TAH_QUANT: _both(_RAW, _RAW),
    "once .05/.3": _once(0.05, 0.3),
    "once .1/.3": _once(0.1, 0.3),
}
SETTINGS: dict[str, dict[str, Any]] = {
    **{
        f"weights {form}": {"model": {"weights": form}, "pipeline": {"precision": "bf16"}}
        for form in ("bf16", "int8", "nf4")
    },
    "adamw8bit": {"train": {"optimizer": "adamw8bit"}},
}
METHODS = {
    BASELINE: _both(_RAW, _RAW),
    **AGAIN,
    **ONCE,
    **dict.fromkeys(SETTINGS, _both(_RAW, _RAW)),
}
_WEIGHTS = [name for name in SETTINGS if "model" in SETTINGS[name]]
GROUPS = {"again": list(AGAIN), "once": list(ONCE), "small": _WEIGHTS}
_QUICK = ["stateless 5/4", "transform .3/.3", "transform .7/.9"]


def run_config(
    options: argparse.Namespace, method: str, *, seed: int, lr: float, cuts: int
) -> RunConfig:
    """Fine-tuning with one method at all cuts, which share the layers evenly."""
    own = SETTINGS.get(method, {})
    model: dict[str, Any] = {"pretrained": str(options.model), **own.get("model", {})}
    if options.lora:
        model["lora"] = {"rank": options.lora, "alpha": 2 * options.lora}
    labelled = {"text_field": 3, "label_field": 1, "labels": ["0", "1"]} if options.labelled else {}
    if options.labelled:
        model |= {"task": "classification", "classes": 2, "dropout": 0.0}
    layers = json.loads((options.model / "config.json").read_text(encoding="utf-8"))[
        "num_hidden_layers"
    ]
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": model,
            "data": {
                "tokenizer": "model",
                "path": str(options.train),
                "eval_path": str(options.eval),
                "train_sequences": options.sequences,
                "eval_sequences": options.held_out,
                "sequence_length": options.tokens,
                **labelled,
            },
            "eval": {"metrics": ["matthews"] if options.labelled else None},
            "pipeline": {
                "cuts": [round(layers * cut / (cuts + 1)) for cut in range(1, cuts + 1)],
                "schedule": "GPipe",
                "microbatches": 4,
                **own.get("pipeline", {}),
            },
            "boundary": [METHODS[method]],
            "train": {
                "epochs": options.epochs,
                "batch_size": options.batch,
                "lr": lr,
                "warmup_steps": options.warmup,
                **own.get("train", {}),
            },
        }
    )


def compare(options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Measure what is missing of the rows that were asked for; returns all of them."""
    records = Records(options.json, go_on=True)
    known = {_key(row): row for row in records.results}
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for lr in options.lr:
            for cuts in options.cuts:
                for method in with_baseline(options.methods, BASELINE):
                    about = {
                        "method": method,
                        "seed": seed,
                        "lr": lr,
                        "cuts": 0 if method == BASELINE else cuts,  # that has no losses
                        "epochs": options.epochs,
                        "lora": options.lora,
                        "sequences": options.sequences,
                        "batch": options.batch,
                        "warmup": options.warmup,
                    }
                    if _key(about) not in known:
                        config = run_config(options, method, seed=seed, lr=lr, cuts=cuts)
                        base = known.get(_key({**about, "method": BASELINE, "cuts": 0}))
                        row = about | _measure(options, config, method, base)
                        records.add({}, row)
                        known[_key(about)] = row
                        print(_words(row), flush=True)
                    rows.append(known[_key(about)])
    return rows


def _measure(
    options: argparse.Namespace, config: RunConfig, method: str, base: Mapping[str, Any] | None
) -> dict[str, Any]:
    tune, held_out = load(config.data)
    coded = DIRECTIONS if method == _TAH_QUANT else ()
    found = fine_tune(
        Corpus(tune, tune, held_out),
        config,
        None,
        method=method,
        codecs={way: TahQuant(config.message_shape[1]) for way in coded},
        eval_batch=_EVAL_BATCH,
    )
    numbers, epochs = found.numbers, [epoch["loss"] for epoch in found.detail["epochs"]]
    losses = {name: numbers[kind] for name, kind in _LOSSES.items()}
    scores = {_SCORE: numbers[_SCORE]} if _SCORE in numbers else {}
    base = base or {"losses": losses, "epoch_losses": epochs, **scores}
    return {
        "ratio_fp32": numbers["x fp32"],
        "ratio_fp32_run": numbers["x fp32, whole run"],
        **{name: loss - base["losses"][name] for name, loss in losses.items()},
        **scores,
        **{f"{name}_gap": score - base[name] for name, score in scores.items()},
        "train_gaps": [a - b for a, b in zip(epochs, base["epoch_losses"], strict=True)],
        "bits_forward": numbers["bits forward"],
        "bits_backward": numbers["bits backward"],
        "losses": losses,
        "epoch_losses": epochs,
        "seconds": found.detail["seconds"],
        "boundary": METHODS[method],
    }


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple({**_USUAL, **row}[name] for name in _KEY)


def _words(row: Mapping[str, Any]) -> str:
    numbers = ", ".join(
        f"{name} {row[name]:{form}}" for name, form in _COLUMNS.items() if name in row
    )
    return f"{row['method']}, seed {row['seed']}, lr {row['lr']:g}: {numbers}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians over seeds, with the range of gaps."""
    found = [
        Row(
            row["method"],
            {name: row.get(name) for name in _COLUMNS},
            {name: row[name] for name in ("lr", "cuts", "epochs", "lora")},
            row["seed"],
        )
        for row in rows
    ]
    return summary(found, _COLUMNS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    options = _parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    named = [method for name in options.methods for method in GROUPS.get(name, [name])]
    options.methods = list(dict.fromkeys(named))
    print(f"\n{table(compare(options))}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = command_line("benchmarks.fidelity.pretrained", __doc__)
    folder = "of a Hugging Face model with tokenizer and safetensors"
    command.add_argument("--model", type=Path, required=True, metavar="FOLDER", help=folder)
    command.add_argument("--train", type=Path, required=True, help="text to train on")
    command.add_argument("--eval", type=Path, required=True, help="held-out text")
    command.add_argument(
        "--methods", nargs="+", choices=[*GROUPS, *METHODS], default=["again"], help="or groups"
    )
    command.add_argument("--seeds", type=int, default=3, help="orders of the sequences (3)")
    command.add_argument("--first-seed", type=int, default=0, help="of them (0)")
    command.add_argument("--lr", type=float, nargs="+", default=[1e-4], help="rates (1e-4)")
    command.add_argument("--cuts", type=int, nargs="+", default=[3], help="numbers of cuts (3)")
    command.add_argument("--epochs", type=int, default=3, help="(3)")
    command.add_argument("--sequences", type=int, default=96, help="to train on (96)")
    command.add_argument("--held-out", type=int, default=64, help="sequences (64)")
    command.add_argument("--batch", type=int, default=8, help="sequences of a step (8)")
    command.add_argument("--warmup", type=int, default=20, help="steps (20)")
    command.add_argument("--tokens", type=int, default=128, help="of a sequence (128)")
    command.add_argument("--lora", type=int, default=0, help="rank; 0 trains all weights (0)")
    command.add_argument("--labelled", action="store_true", help="tables of labelled sentences")
    command.add_argument("--threads", type=int, default=0, help="of torch (0: its own choice)")
    quick = {"methods": _QUICK, "seeds": 1, "sequences": 48, "held_out": 16}
    return parse_options(command, arguments, "quick", quick)


if __name__ == "__main__":
    main()
