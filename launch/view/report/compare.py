"""Several runs on one page: their losses together, and their numbers side by side."""

from collections.abc import Sequence
from pathlib import Path

from thinpipe.launch.view.report.content import Json, Story, table
from thinpipe.launch.view.report.html import page, whole
from thinpipe.launch.view.report.metric_table import LOSSES, METRICS, SPEED, label
from thinpipe.launch.view.report.metrics import RunInfo

_KEYS = (
    *LOSSES,
    "speed/step_s",
    *SPEED,
    *("sent", "ratio_bf16", "bytes/replicas", "train/skipped"),
)


def write_page(file: Path, runs: Sequence[Story]) -> None:
    """Write one page about a run, or about several."""
    messages = [whole(run, number) for number, run in enumerate(runs)]
    title = ", ".join(names_of([run.info for run in runs]))
    messages += [comparison(runs)] if len(runs) > 1 else []
    file.write_text(page(f"{title} - ThinPipe", messages), encoding="utf-8")


def comparison(runs: Sequence[Story]) -> Json:
    """A message about several runs, whose other messages come first."""
    names, unit = names_of([run.info for run in runs]), runs[0].info.unit
    rows = [
        ["Steps done", *(f"{r.summary['steps']:,} of {r.info.total_steps:,}" for r in runs)],
        *(
            [label(METRICS[key].long, unit), *(METRICS[key].text(r.summary) for r in runs)]
            for key in _KEYS
        ),
        ["Size", *(r.info.size for r in runs)],
        ["Cuts", *(", ".join(map(str, r.info.cuts)) or "none" for r in runs)],
        ["Forward", *(_methods(r.info, "forward") for r in runs)],
        ["Backward", *(_methods(r.info, "backward") for r in runs)],
    ]
    return {"names": names, "table": table("compared", "Numbers", ("Number", *names), rows)}


def names_of(runs: Sequence[RunInfo]) -> list[str]:
    """Names of runs, or their folders where names are not enough."""
    names = [info.name for info in runs]
    unique = len(set(names)) == len(names)
    return names if unique else [str(info.folder) for info in runs]


def _methods(info: RunInfo, way: str) -> str:
    found = [method for (_, direction), method in info.methods.items() if direction == way]
    return ", ".join(dict.fromkeys(found)) or "-"
