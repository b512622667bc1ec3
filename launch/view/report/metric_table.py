"""The one table of metrics: what each is called, and how it is written, wherever it is shown.

The panel, the final tables, the report, comparisons and other tools choose rows by their keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinpipe.launch.host.words import (
    NOTHING,
    format_bytes,
    format_duration,
    format_loss,
    format_ratio,
    format_repaired,
    format_share,
    format_speed,
)
from thinpipe.launch.view.report.metrics import StepRecord
from thinpipe.launch.view.report.summary import Summary, direction_bytes


@dataclass(frozen=True)
class Metric:
    """A number of a step, of a whole run, or of both.

    A `key` with a slash is its name in other tools. `short` is for terminals, `long` for pages.
    """

    key: str
    short: str
    long: str
    show: Callable[[Any], str]
    of_step: Callable[[StepRecord], Any] = lambda _: None
    of_run: Callable[[Summary], Any] = lambda _: None

    def text(
        self, source: StepRecord | Summary, show_bytes: Callable[[int], str] = format_bytes
    ) -> str:
        value = self.of_step(source) if isinstance(source, StepRecord) else self.of_run(source)
        if value is None:
            return NOTHING
        return (show_bytes if self.show is format_bytes else self.show)(value)


def _whole(count: int) -> str:
    return f"{count:,}"


def _eval(name: str) -> tuple[Callable[[StepRecord], Any], Callable[[Summary], Any]]:
    return lambda r: (r.eval or {}).get(name), lambda s: (s["eval"] or {}).get(name)


METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("train/loss", "loss", "Training loss, last epoch", format_loss,
               lambda r: r.loss, lambda s: s["final_loss"]),
        Metric("first_loss", "first loss", "Loss of the first step", format_loss,
               of_run=lambda s: s["first_loss"]),
        Metric("eval/loss", "eval", "Evaluation loss", format_loss, *_eval("loss")),
        Metric("eval/loss_compressed", "compressed", "Evaluation loss, compressed", format_loss,
               *_eval("loss_compressed")),
        Metric("speed/tokens_per_s", "tokens/s", "Tokens per second, median", format_speed,
               lambda r: r.tokens_per_s, lambda s: s["median_tokens_per_s"]),
        Metric("speed/bubble", "bubble", "Bubble, mean", format_share,
               lambda r: r.bubble, lambda s: s["mean_bubble"]),
        Metric("speed/step_s", "step time", "Step time, median", format_duration,
               lambda r: r.step_s, lambda s: s["median_step_s"]),
        Metric("wall_s", "time", "Time in steps", format_duration, of_run=lambda s: s["wall_s"]),
        Metric("train/epoch", "epoch", "Epochs", _whole, lambda r: r.epoch, lambda s: s["epochs"]),
        Metric("steps", "steps", "Steps", _whole, of_run=lambda s: s["steps"]),
        Metric("train/skipped", "skipped", "Skipped steps", _whole,
               lambda r: r.skipped, lambda s: s["skipped"]),
        Metric("tokens", "tokens", "Tokens", _whole, of_run=lambda s: s["tokens"]),
        Metric("train/grad_norm", "grad norm", "Gradient norm", lambda norm: f"{norm:.3g}",
               lambda r: r.grad_norm),
        Metric("train/lr", "lr", "Learning rate", lambda rate: f"{rate:.2e}", lambda r: r.lr),
        Metric("sent", "sent", "Sent over the cuts", format_bytes,
               lambda r: sum(count.nbytes for count in r.wire), lambda s: s["totals"]["bytes"]),
        Metric("ratio_bf16", "vs bf16", "Compression ratio to bf16", format_ratio,
               of_run=lambda s: s["totals"]["ratio_bf16"]),
        Metric("activations", "activations", "Activations", format_bytes,
               lambda r: r.sent("forward"), lambda s: direction_bytes(s, "forward")),
        Metric("gradients", "gradients", "Activation gradients", format_bytes,
               lambda r: r.sent("backward"), lambda s: direction_bytes(s, "backward")),
        Metric("bytes/replicas", "replicas", "Sent between replicas", format_bytes,
               lambda r: r.sync_bytes, lambda s: s["sync_bytes"]),
        Metric("ratio_fp32", "vs fp32", "Ratio to fp32 all-reduce", format_ratio,
               of_run=lambda s: s["sync_ratio_fp32"]),
        Metric("bytes/control", "control", "Control messages", format_bytes,
               lambda r: r.control_bytes, lambda s: s["control_bytes"]),
        Metric("bytes/shards_weights", "weights", "Weights between shards", format_bytes,
               lambda r: r.weight_bytes or None, lambda s: s["weight_bytes"] or None),
        Metric("bytes/shards_gradients", "weight grads", "Gradients between shards", format_bytes,
               lambda r: r.gradient_bytes or None, lambda s: s["gradient_bytes"] or None),
        Metric("repaired", "cache resets", "Cached activations reset", format_repaired,
               of_run=lambda s: s["repaired"]),
    )
}  # fmt: skip
LOSSES = ("train/loss", "eval/loss", "eval/loss_compressed")
SPEED = ("speed/tokens_per_s", "speed/bubble")
TRAFFIC = ("activations", "gradients", "bytes/replicas", "bytes/control")
SHARDS = ("bytes/shards_weights", "bytes/shards_gradients")
"""Shown where there are shards."""


def shown(
    keys: Sequence[str],
    source: StepRecord | Summary,
    *,
    unit: str,
    long: bool = False,
    show_bytes: Callable[[int], str] = format_bytes,
) -> list[tuple[str, str]]:
    """Labels and values; `unit` ("token" or "sample") is what the run counts."""
    rows = [METRICS[key] for key in keys]
    return [
        (label(row.long if long else row.short, unit), row.text(source, show_bytes)) for row in rows
    ]


def label(text: str, unit: str) -> str:
    """A label of the table for a run that counts tokens or samples."""
    return text.replace("token", unit).replace("Token", unit.capitalize())


def other_scores(evaluation: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Names and values (three decimals) of an evaluation's metrics other than losses."""
    return [
        (_score_name(name), NOTHING if value is None else f"{value:.3f}")
        for name, value in evaluation.items()
        if not name.startswith("loss")
    ]


def _score_name(name: str) -> str:
    plain = name.removesuffix("_compressed")
    return plain if plain == name else f"compressed {plain}"


def scalars(record: StepRecord) -> dict[str, float]:
    """All numbers of a step under the names that tools show: a group, a slash, a name.

    Bytes are those of the step: across each cut and direction, between replicas and so on. Those of
    an evaluation and of `run.log` are there if there are any.
    """
    values = {key: row.of_step(record) for key, row in METRICS.items() if "/" in key}
    found = {key: float(value) for key, value in values.items() if value is not None}
    for count in record.wire:
        place = f"cut_{count.cut}_{count.direction}"
        found[f"bytes/{place}"] = count.nbytes
        for name in ("error", "channel_error", "channel_change", "largest_share"):
            if (measured := getattr(count, name)) is not None:
                found[f"{name}/{place}"] = measured
    found |= {f"eval/{name}": value for name, value in (record.eval or {}).items()}
    return found | {f"own/{name}": value for name, value in record.own.items()}
