"""Several runs on one page: their losses together, and their numbers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinpipe.launch.view.report.charts import compared_losses
from thinpipe.launch.view.report.html import page, panel, table
from thinpipe.launch.view.report.metric_table import LOSSES, METRICS, SPEED, label
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import Summary

_KEYS = (
    *LOSSES,
    "speed/step_s",
    *SPEED,
    *("sent", "ratio_bf16", "bytes/replicas", "train/skipped"),
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
{_table(names, runs)}"""
    file.write_text(page(title, body), encoding="utf-8")


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    """Names of runs, or their folders where names are not enough."""
    names = [run.info.name for run in runs]
    unique = len(set(names)) == len(names)
    return names if unique else [str(run.info.folder) for run in runs]


def _table(names: Sequence[str], runs: Sequence[ReportedRun]) -> str:
    unit = runs[0].info.unit
    rows = [
        ["Steps done", *(f"{r.summary['steps']:,} of {r.info.total_steps:,}" for r in runs)],
        *(
            [label(METRICS[key].long, unit), *(METRICS[key].text(r.summary) for r in runs)]
            for key in _KEYS
        ),
        ["Size", *(r.info.size for r in runs)],
        ["Cuts", *(escape(", ".join(map(str, r.info.cuts)) or "none") for r in runs)],
        ["Forward", *(escape(_methods(r.info, "forward")) for r in runs)],
        ["Backward", *(escape(_methods(r.info, "backward")) for r in runs)],
    ]
    return table(("",), [escape(name) for name in names], rows)


def _methods(info: RunInfo, way: str) -> str:
    found = [method for (_, direction), method in info.methods.items() if direction == way]
    return ", ".join(dict.fromkeys(found)) or "-"
