"""Several runs on one page: their losses together, and their numbers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinpipe.launch.report.charts import compared_losses
from thinpipe.launch.report.html import page, panel
from thinpipe.launch.report.metrics import RunInfo, StepRecord
from thinpipe.launch.report.summary import Summary
from thinpipe.launch.words import (
    format_bytes,
    format_duration,
    format_loss,
    format_ratio,
    format_speed,
)


@dataclass(frozen=True)
class ReportedRun:
    """A run, as its folder tells it."""

    info: RunInfo
    records: Sequence[StepRecord]
    summary: Summary


def write_comparison(file: Path, runs: Sequence[ReportedRun]) -> None:
    """Write one page about several runs."""
    names = _names(runs)
    chart = compared_losses([(name, run.records) for name, run in zip(names, runs, strict=True)])
    title = "Comparison of " + ", ".join(names)
    body = f"""<h1>{escape(title)}</h1>
<h2>Loss</h2>
<p>Training loss, smoothed. Point at the chart for the values of a step.</p>
{panel(chart.svg())}
<h2>Numbers</h2>
{panel(_table(names, runs))}"""
    file.write_text(page(title, body), encoding="utf-8")


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    """Names of runs, or their folders where names are not enough."""
    names = [run.info.name for run in runs]
    unique = len(set(names)) == len(names)
    return names if unique else [str(run.info.folder) for run in runs]


def _table(names: Sequence[str], runs: Sequence[ReportedRun]) -> str:
    heads = "".join(f'<th class="n">{escape(name)}</th>' for name in names)
    rows = {
        "Steps": [f"{run.summary['steps']:,} of {run.info.total_steps:,}" for run in runs],
        "Training loss, last epoch": [format_loss(r.summary["final_loss"]) for r in runs],
        "Evaluation loss": [format_loss((r.summary["eval"] or {}).get("loss")) for r in runs],
        "Evaluation loss, compressed": [
            format_loss((r.summary["eval"] or {}).get("loss_compressed")) for r in runs
        ],
        "Step time, median": [format_duration(r.summary["median_step_s"]) for r in runs],
        "Tokens or samples per second": [
            format_speed(r.summary["median_tokens_per_s"]) for r in runs
        ],
        "Bubble, mean": [f"{r.summary['mean_bubble']:.1%}" for r in runs],
        "Sent over the cuts": [format_bytes(r.summary["totals"]["bytes"]) for r in runs],
        "Ratio to bf16": [format_ratio(r.summary["totals"]["ratio_bf16"]) for r in runs],
        "Sent between replicas": [format_bytes(r.summary["sync_bytes"]) for r in runs],
        "Skipped steps": [f"{r.summary['skipped']:,}" for r in runs],
        "Size": [r.info.size for r in runs],
        "Cuts": [escape(", ".join(map(str, r.info.cuts)) or "none") for r in runs],
        "Forward": [escape(_methods(r.info, "forward")) for r in runs],
        "Backward": [escape(_methods(r.info, "backward")) for r in runs],
    }
    lines = "\n".join(
        f"<tr><th>{name}</th>{''.join(f'<td class=n>{value}</td>' for value in values)}</tr>"
        for name, values in rows.items()
    )
    return f"<table>\n<thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>"


def _methods(info: RunInfo, way: str) -> str:
    found = [method for (_, direction), method in info.methods.items() if direction == way]
    return ", ".join(dict.fromkeys(found)) or "-"
