"""The tables at the end of a run."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinpipe.launch.display.grids import between_shards, labelled, traffic_table
from thinpipe.launch.report.edges import edge_table
from thinpipe.launch.report.metrics import (
    RunInfo,
    format_bytes,
    format_duration,
    format_loss,
    format_rate,
    format_ratio,
    other_scores,
)
from thinpipe.launch.report.summary import Summary, direction_bytes, traffic_cells


def final_tables(info: RunInfo, summary: Summary, *, written: bool) -> RenderableType:
    """All numbers of a finished run; the report is named if it was `written` here."""
    losses = summary["eval"] or {}
    cells = [
        ("loss, mean of last epoch", format_loss(summary["final_loss"])),
        ("eval loss", format_loss(losses.get("loss"))),
        ("eval loss, compressed", format_loss(losses.get("loss_compressed"))),
        (f"median {info.unit}s/s", format_rate(summary["median_tokens_per_s"])),
        ("time in steps", format_duration(summary["wall_s"])),
        ("mean bubble", f"{summary['mean_bubble']:.1%}"),
        ("steps", f"{summary['steps']:,} ({summary['skipped']:,} skipped)"),
        ("activations", format_bytes(direction_bytes(summary, "forward"))),
        ("activation gradients", format_bytes(direction_bytes(summary, "backward"))),
        ("between replicas", format_bytes(summary["sync_bytes"])),
        ("ratio to fp32", format_ratio(summary["sync_ratio_fp32"])),
        ("control messages", format_bytes(summary["control_bytes"])),
        *between_shards(summary["weight_bytes"], summary["gradient_bytes"]),
        *((f"eval {name}", value) for name, value in other_scores(losses)),
    ]
    if summary["repaired"]:
        cells.append(("cache resets", f"{sum(summary['repaired'].values()):,} samples"))
    title = Text.assemble(("Finished ", "bold green"), (info.name, "bold"))
    parts: list[RenderableType] = ["", title, "", labelled(cells, columns=3), ""]
    if summary["wire"]:
        parts += [_final_traffic(summary), ""]
        note = "sent: bytes on the wire with headers; bf16, fp32: the same values uncompressed"
        parts += [Text(note, style="dim"), ""]
    if summary["edges"]:
        parts += [edge_table(summary["edges"]), ""]
    if written:
        page = str(info.folder / "report.html")
        parts.append(Text.assemble(("report  ", "dim"), page, overflow="fold"))
    return Group(*parts)


def _final_traffic(summary: Summary) -> Table:
    table = traffic_table()
    headers = ("messages", "sent", "bf16", "ratio", "fp32", "ratio")
    for header, footer in zip(headers, traffic_cells(summary["totals"]), strict=True):
        table.add_column(header, justify="right", no_wrap=True, footer=footer)
    for row in summary["wire"]:
        table.add_row(str(row["cut"]), row["direction"], row["method"], *traffic_cells(row))
    return table
