"""Tables (Markdown) and plot of the convergence benchmark.

    python -m benchmarks.fidelity.report out.jsonl more.jsonl --plot out.png

Outcomes of several files are merged; every seed needs its baseline.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import format_table
from benchmarks.theme import GRID, INK, MUTED, SERIES

BASELINE = "fp32"
NOTHING = "-"
_STYLES = {"aq": "-", "direct": "--", "stateless": "-."}


@dataclass(frozen=True)
class Epoch:
    """One epoch of fine-tuning. `loss` is the mean over its tokens, in nats, compression on.

    Bytes are counted at the links, headers included; `values` is how many numbers they stand for.
    `change` is |m' - m| / |m'| of AQ-SGD's memories m before and m' after, the mean over cuts.
    """

    loss: float
    forward_bytes: int
    backward_bytes: int
    values: int
    change: float | None

    @property
    def nbytes(self) -> int:
        """Both directions."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Outcome:
    """One method with one seed. Held-out losses are in nats, before and after.

    `scores` are other metrics of the evaluations, such as the accuracy.
    """

    method: str
    seed: int
    epochs: tuple[Epoch, ...]
    held_out_before: float
    held_out: float
    held_out_compressed: float
    seconds: float
    lr: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    scores_compressed: Mapping[str, float] = field(default_factory=dict)

    @property
    def final_loss(self) -> float:
        """Training loss of the last epoch."""
        return self.epochs[-1].loss


@dataclass(frozen=True)
class Row:
    """A method with one seed and rate, against the uncompressed run that is like it otherwise.

    Bits are per value and direction in all epochs but the first, headers included, and `ratio_fp32`
    is of these; `ratio_fp32_run` is of all epochs. Gaps are in nats.
    """

    method: str
    seed: int
    lr: float
    bits_forward: float
    bits_backward: float
    ratio_fp32: float
    ratio_fp32_run: float
    train_gap: float
    held_out_gap: float
    held_out_compressed_gap: float


def make_row(outcome: Outcome, baseline: Outcome) -> Row:
    """The outcome's row."""
    later = outcome.epochs[1:] or outcome.epochs
    each = sum(epoch.values for epoch in later) / 2
    return Row(
        method=outcome.method,
        seed=outcome.seed,
        lr=outcome.lr,
        bits_forward=8 * sum(epoch.forward_bytes for epoch in later) / each,
        bits_backward=8 * sum(epoch.backward_bytes for epoch in later) / each,
        ratio_fp32=_ratio(later),
        ratio_fp32_run=_ratio(outcome.epochs),
        train_gap=outcome.final_loss - baseline.final_loss,
        held_out_gap=outcome.held_out - baseline.held_out,
        held_out_compressed_gap=outcome.held_out_compressed - baseline.held_out_compressed,
    )


def row_table(rows: Sequence[Row]) -> str:
    """A line per method and rate: medians over seeds, and the worst seed's gap."""
    heads = (
        *("method", "lr", "seeds", "bits forward", "bits backward", "vs fp32", "whole run"),
        *("training loss", "worst seed", "held out", "held out, compressed"),
    )
    lines = []
    for method, lr in dict.fromkeys((row.method, row.lr) for row in rows):
        found = [row for row in rows if (row.method, row.lr) == (method, lr)]
        lines.append(
            [
                method,
                f"{lr:g}",
                str(len(found)),
                f"{median(row.bits_forward for row in found):.2f}",
                f"{median(row.bits_backward for row in found):.2f}",
                f"{median(row.ratio_fp32 for row in found):.1f}x",
                f"{median(row.ratio_fp32_run for row in found):.1f}x",
                f"{median(row.train_gap for row in found):+.4f}",
                f"{max(row.train_gap for row in found):+.4f}",
                f"{median(row.held_out_gap for row in found):+.4f}",
                f"{median(row.held_out_compressed_gap for row in found):+.4f}",
            ]
        )
    return format_table(heads, lines)


def _ratio(epochs: Sequence[Epoch]) -> float:
    return 4 * sum(epoch.values for epoch in epochs) / sum(epoch.nbytes for epoch in epochs)


def read_outcomes(path: Path) -> list[Outcome]:
    """The outcomes in a file of records, one JSON object per line."""
    results = [
        json.loads(line)["result"]["outcome"]
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [
        Outcome(**{**found, "epochs": tuple(Epoch(**epoch) for epoch in found["epochs"])})
        for found in results
    ]


def summary_table(outcomes: Sequence[Outcome]) -> str:
    """One row per method: medians over seeds; only coded messages differ in bytes."""
    heads = (
        "method",
        "final train loss",
        "to fp32",
        "held out",
        "held out, compressed",
        "MB epoch 1",
        "MB later",
        "to fp32 wire",
        "to bf16 wire",
        "change, epoch 2 to last",
    )
    return format_table(heads, [_summary(outcomes, method) for method in _methods(outcomes)])


def relative_table(outcomes: Sequence[Outcome]) -> str:
    """One row per method: medians and ranges of differences to the baseline of the same seed."""
    heads = (
        "method",
        "runs",
        "train loss to fp32",
        "range",
        "held out",
        "held out, compressed",
        "MB epoch 1",
        "MB later",
        "ratio",
    )
    return format_table(heads, [_relative(outcomes, method) for method in _methods(outcomes)])


def score_table(outcomes: Sequence[Outcome]) -> str:
    """Other metrics on held-out samples: by seed without compression, medians with it."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.scores))
    heads = [f"{name}{how}" for name in names for how in (", by seed", ", compressed")]
    rows = []
    for method in _methods(outcomes):
        found = [outcome for outcome in outcomes if outcome.method == method]
        row = [method]
        for name in names:
            with_it = [o.scores_compressed[name] for o in found if name in o.scores_compressed]
            row.append(", ".join(f"{outcome.scores[name]:.3f}" for outcome in found))
            row.append(f"{median(with_it):.3f}" if with_it else NOTHING)
        rows.append(row)
    return format_table(["method", *heads], rows)


def per_seed_table(outcomes: Sequence[Outcome]) -> str:
    """One row per method: final training loss and its difference to fp32, for the seeds it has."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    heads = [
        "method",
        *(f"seed {seed}" for seed in seeds),
        *(f"to fp32, seed {seed}" for seed in seeds),
    ]
    rows = []
    for method in _methods(outcomes):
        found = {outcome.seed: outcome for outcome in outcomes if outcome.method == method}
        own = [found.get(seed) for seed in seeds]
        losses = [f"{o.final_loss:.4f}" if o else NOTHING for o in own]
        gaps = [f"{_difference(outcomes, o, -1):+.4f}" if o else NOTHING for o in own]
        rows.append([method, *losses, *gaps])
    return format_table(heads, rows)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Training loss by epoch, and its difference to fp32: median and range over the seeds."""
    figure = Figure(figsize=(10.0, 3.8), dpi=110, layout="constrained")
    absolute, relative = figure.subplots(1, 2)
    for method in _methods(outcomes):
        _draw_lines(absolute, outcomes, method, lambda outcome, epoch: outcome.epochs[epoch].loss)
        if method != BASELINE:
            _draw_lines(relative, outcomes, method, lambda o, e: _difference(outcomes, o, e))
    absolute.set_ylabel("training loss [nats/byte]")
    relative.set_ylabel("difference to fp32 of the same seed")
    relative.set_yscale("symlog", linthresh=0.01)
    relative.axhline(0.0, color=INK, linewidth=0.8)
    for axes in (absolute, relative):
        axes.set_xlabel("epoch")
        axes.grid(color=GRID)
    figure.legend(*absolute.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path)


def _draw_lines(
    axes: Axes, outcomes: Sequence[Outcome], method: str, value: Callable[[Outcome, int], float]
) -> None:
    of_method = [outcome for outcome in outcomes if outcome.method == method]
    epochs = range(len(of_method[0].epochs))
    values = [sorted(value(outcome, epoch) for outcome in of_method) for epoch in epochs]
    color, style = _look(method)
    numbers = [epoch + 1 for epoch in epochs]
    axes.plot(numbers, [median(v) for v in values], style, color=color, label=method, linewidth=1.4)
    low, high = [v[0] for v in values], [v[-1] for v in values]
    axes.fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0)


def tables(outcomes: Sequence[Outcome]) -> str:
    """All that apply."""
    first = {outcome.seed: outcome for outcome in outcomes if outcome.method == BASELINE}
    rows = [make_row(outcome, first[outcome.seed]) for outcome in outcomes]
    found = [row_table(rows), summary_table(outcomes), per_seed_table(outcomes)]
    found.append(relative_table(outcomes))
    if any(outcome.scores for outcome in outcomes):
        found.append(score_table(outcomes))
    return "\n\n".join(found)


def _look(method: str) -> tuple[str, str]:
    """Colour by bits, one for all rates; line style by kind."""
    kind = method.split()[0]
    if kind not in _STYLES:
        return (INK if method == BASELINE else MUTED), "-"
    bits = ("fw4", "fw3", "fw2", "fw6", "rate")
    color = next(c for b, c in zip(bits, SERIES, strict=False) if b in method)
    return color, ":" if "," in method else _STYLES[kind]


def _summary(outcomes: Sequence[Outcome], method: str) -> list[str]:
    of_method = [outcome for outcome in outcomes if outcome.method == method]
    first, last = (_nbytes(of_method, epoch) for epoch in (0, -1))
    values = of_method[0].epochs[-1].values
    changes = [[change for o in of_method for change in _changes(o)[e:][:1]] for e in (0, -1)]
    return [
        method,
        f"{median(o.final_loss for o in of_method):.4f}",
        f"{median(_differences(outcomes, method)):+.4f}",
        f"{median(o.held_out for o in of_method):.4f}",
        f"{median(o.held_out_compressed for o in of_method):.4f}",
        f"{first / 1e6:.1f}",
        f"{last / 1e6:.1f}",
        f"{4 * values / last:.2f}x",
        f"{2 * values / last:.2f}x",
        " to ".join(f"{median(ratios):.3f}" for ratios in changes) if changes[0] else NOTHING,
    ]


def _relative(outcomes: Sequence[Outcome], method: str) -> list[str]:
    runs = [(o, _baseline(outcomes, o)) for o in outcomes if o.method == method]
    gaps = _differences(outcomes, method)
    first, last = (_nbytes([o for o, _ in runs], epoch) for epoch in (0, -1))
    return [
        method,
        str(len(runs)),
        f"{median(gaps):+.4f}",
        f"{min(gaps):+.4f} to {max(gaps):+.4f}",
        f"{median(o.held_out - base.held_out for o, base in runs):+.4f}",
        f"{median(o.held_out_compressed - base.held_out for o, base in runs):+.4f}",
        f"{first / 1e6:.1f}",
        f"{last / 1e6:.1f}",
        f"{first / last:.2f}",
    ]


def _nbytes(runs: Sequence[Outcome], epoch: int) -> float:
    return median(o.epochs[epoch].nbytes for o in runs)


def _changes(outcome: Outcome) -> list[float]:
    """Of the memories; the first epoch has none to compare with."""
    return [epoch.change for epoch in outcome.epochs if epoch.change is not None]


def _methods(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.method for outcome in outcomes))


def _differences(outcomes: Sequence[Outcome], method: str) -> list[float]:
    """Final training loss less that of fp32 with the same seed."""
    return [_difference(outcomes, o, -1) for o in outcomes if o.method == method]


def _difference(outcomes: Sequence[Outcome], outcome: Outcome, epoch: int) -> float:
    return outcome.epochs[epoch].loss - _baseline(outcomes, outcome).epochs[epoch].loss


def _baseline(outcomes: Sequence[Outcome], outcome: Outcome) -> Outcome:
    return next(o for o in outcomes if o.method == BASELINE and o.seed == outcome.seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tables and picture of outcomes that were recorded before, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.report")
    parser.add_argument("records", type=Path, nargs="+", help="files that --json wrote")
    parser.add_argument("--methods", nargs="+", help="to draw (default all)")
    parser.add_argument("--plot", type=Path, help="PNG of the training loss by epoch")
    options = parser.parse_args(arguments)
    outcomes = [outcome for path in options.records for outcome in read_outcomes(path)]
    print(tables(outcomes))
    if options.plot is not None:
        drawn = [o for o in outcomes if not options.methods or o.method in options.methods]
        draw(drawn, options.plot)


if __name__ == "__main__":
    main()
