"""Tables of what crossed each cut: of the last step, and of a whole run."""

from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinpipe.launch.host.words import format_bytes, format_ratio, format_share
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import Summary, traffic_cells
from thinpipe.pipeline.wire.told import DIRECTIONS, WireTotal

_WIDE_METHOD = 16  # columns; longer names are folded, so that numbers have room in 80
_COLUMNS: tuple[tuple[str, int, Callable[[StepRecord, WireTotal], str]], ...] = (
    ("{}/step", 0, lambda _, sent: format_bytes(sent.nbytes)),
    ("Mbit/s", 58, lambda record, sent: record.mbps(sent.nbytes)),
    ("vs bf16", 68, lambda _, sent: _ratio(2 * sent.values, sent.nbytes)),
    ("vs fp32", 100, lambda _, sent: _ratio(4 * sent.values, sent.nbytes)),
    ("error", 76, lambda _, sent: format_share(sent.channel_error)),
)
"""Of each direction: header, the terminal width from which it is shown, and its text."""


def _ratio(uncompressed: int, nbytes: int) -> str:
    return format_ratio(uncompressed / nbytes if nbytes else None)


def step_traffic(info: RunInfo, record: StepRecord, cuts: int, *, width: int) -> RenderableType:
    """A line for each of the first `cuts` cuts, both directions side by side, and for all."""
    if not info.cuts:
        return Text("one stage, so no cuts", style="dim")
    columns = [(header, show) for header, least, show in _COLUMNS if width >= least]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, header_style="dim")
    table.add_column("cut")
    for way in DIRECTIONS:
        for header, _ in columns:
            table.add_column(header.format(way), justify="right", no_wrap=True)
    sent = {(count.cut, count.direction): count for count in record.wire}
    for cut in info.cuts[:cuts]:
        counts = [sent.get((cut, way)) for way in DIRECTIONS]
        table.add_row(
            str(cut), *(show(record, count) if count else "" for count in counts
                        for _, show in columns)
        )  # fmt: skip
    blank = [""] * max(0, len(columns) - 2)
    totals = [(format_bytes(n), record.mbps(n)) for n in map(record.sent, DIRECTIONS)]
    table.add_row(
        "all", *(cell for two in totals for cell in (*two[: len(columns)], *blank)), style="bold"
    )
    left = len(info.cuts) - cuts
    more = [Text(f"and {left} more cuts, on a taller terminal", style="dim")] if left else []
    return Group(_methods(info), table, *more)


def _methods(info: RunInfo) -> Text:
    parts = []
    for direction in DIRECTIONS:
        by_method: dict[str, list[str]] = {}
        for cut in info.cuts:
            by_method.setdefault(info.method((cut, direction)), []).append(str(cut))
        named = (
            f"{method} (cut {', '.join(found)})" if len(by_method) > 1 else method
            for method, found in by_method.items()
        )
        parts.append(f"{direction} {', '.join(named)}")
    return Text("; ".join(parts), style="dim")


def run_traffic(summary: Summary) -> Table:
    """A row for each cut and direction."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0, expand=True,
                  header_style="dim", footer_style="bold", show_footer=True)  # fmt: skip
    table.add_column("cut", footer="all")
    table.add_column("direction", no_wrap=True)
    table.add_column("method", overflow="fold", max_width=_WIDE_METHOD)
    headers = ("messages", "sent", "bf16", "ratio", "fp32", "ratio")
    for header, footer in zip(headers, traffic_cells(summary["totals"]), strict=True):
        table.add_column(header, justify="right", no_wrap=True, footer=footer)
    for row in summary["wire"]:
        table.add_row(str(row["cut"]), row["direction"], row["method"], *traffic_cells(row))
    return table
