"""The tables at the end of a run."""

import math
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinpipe.launch.host.words import format_bytes, format_duration, format_ratio
from thinpipe.launch.view.report.edges import edge_table
from thinpipe.launch.view.report.metric_table import (
    LOSSES,
    SHARDS,
    SPEED,
    TRAFFIC,
    other_scores,
    shown,
)
from thinpipe.launch.view.report.metrics import RunInfo
from thinpipe.launch.view.report.summary import Summary
from thinpipe.launch.view.terminal.grids import labelled
from thinpipe.launch.view.terminal.traffic import run_traffic

_LINK_BPS = 100e6  # as most tables of results have it
_MOST_LOSS = 50.0  # exp of more is a number that nobody reads


class Left(NamedTuple):
    """Size of a run's folder: bytes, those of its checkpoints, and how many."""

    nbytes: int
    saved: int
    checkpoints: int


def what_is_left(folder: Path) -> Left:
    """Counted on this machine's disk."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    root = folder / "checkpoints"
    saved = [nbytes for path, nbytes in sizes.items() if root in path.parents]
    return Left(sum(sizes.values()), sum(saved), len([*root.glob("step-*")]))


def final_tables(info: RunInfo, summary: Summary, left: Left | None) -> RenderableType:
    """All numbers of a finished run, and at last in words; what is `left` is named."""
    keys = (*LOSSES, *SPEED, "wall_s", "steps", "train/skipped", *TRAFFIC, "ratio_fp32")
    keys += (*(SHARDS if info.shards > 1 else ()), *(["repaired"] if summary["repaired"] else ()))
    cells = shown(keys, summary, unit=info.unit, long=True)
    cells += [(f"Evaluation {name}", value) for name, value in other_scores(summary["eval"] or {})]
    title = Text.assemble(("Finished ", "bold green"), (info.name, "bold"))
    parts: list[RenderableType] = ["", title, "", labelled(cells, columns=2), ""]
    if summary["wire"]:
        parts += [run_traffic(summary), ""]
        note = "sent: bytes on the wire with headers; bf16, fp32: the same values uncompressed"
        parts += [Text(note, style="dim"), ""]
    if summary["edges"]:
        parts += [edge_table(summary["edges"]), ""]
    parts.append(_in_words(summary, left))
    if left is not None:
        page = str(info.folder / "report.html")
        parts += ["", Text.assemble(("report  ", "dim"), page, overflow="fold")]
    return Group(*parts)


def _in_words(summary: Summary, left: Left | None) -> Table:
    rows: dict[str, str] = {}
    ended = (summary["eval"] or {}).get("loss")
    final = summary["final_loss"] if ended is None else ended
    if summary["first_loss"] is not None and final is not None:
        where = "" if ended is None else " on held-out samples"
        rows["learned"] = f"loss {summary['first_loss']:.2f} at the start, {final:.2f}{where} now"
        if summary["unit"] == "token":
            choices = [math.exp(min(loss, _MOST_LOSS)) for loss in (summary["first_loss"], final)]
            rows["learned"] += f": perplexity {choices[0]:,.3g}, now {choices[1]:,.3g}"
    sent = summary["totals"]
    if sent["bytes"]:
        bf16, fp32 = format_ratio(sent["ratio_bf16"]), format_ratio(sent["ratio_fp32"])
        amount = format_bytes(sent["bytes"])
        rows["sent"] = f"{amount} between stages; bf16 {bf16} as much, fp32 {fp32}"
        busiest = max(summary["wire"], key=lambda row: row["bytes"])
        now_s, plain_s = (8 * busiest[kind] / _LINK_BPS for kind in ("bytes", "fp32_bytes"))
        rows["at 100 Mbit/s"] = (
            f"the busiest link would take {format_duration(now_s)} for its part, in fp32 "
            f"{format_duration(plain_s)}"
        )
    if left is not None:
        rows["left"] = f"{format_bytes(left.nbytes)} in the run's folder"
        if left.checkpoints:
            several = "s" if left.checkpoints > 1 else ""
            rows["left"] += (
                f", {format_bytes(left.saved)} of it in {left.checkpoints} checkpoint{several}"
            )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    return table
