"""Pieces of the panel and of the final tables: a run in words, labelled values, tables of cuts."""

import textwrap
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from thinpipe.launch.report.metrics import RunInfo
from thinpipe.launch.words import format_bytes

_WIDE_METHOD = 16


def shape_of(info: RunInfo) -> str:
    """The run in a line, or in two that fit the panel: size, stages, schedule."""
    parts = (
        info.size,
        _plural(info.stages, "stage"),
        _plural(info.replicas, "replica"),
        *([_plural(info.shards, "shard")] if info.shards > 1 else []),
        info.schedule,
        _plural(info.microbatches, "microbatch", "microbatches"),
    )
    return textwrap.fill(", ".join(parts), width=76)


def labelled(pairs: Sequence[tuple[str, str]], columns: int = 4) -> Table:
    """Lay out (label, value) pairs in equal columns, the label above its value."""
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    for start in range(0, len(pairs), columns):
        row = pairs[start : start + columns]
        grid.add_row(*(Text(label, style="dim") for label, _ in row))
        grid.add_row(*(Text(value, style="bold") for _, value in row))
    return grid


def traffic_table() -> Table:
    """A table of cuts, with its first columns."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0, expand=True,
                  header_style="dim", footer_style="bold", show_footer=True)  # fmt: skip
    table.add_column("cut", footer="all")
    table.add_column("direction", no_wrap=True)
    table.add_column("method", overflow="fold", max_width=_WIDE_METHOD)
    return table


def between_shards(weights: int, gradients: int) -> list[tuple[str, str]]:
    """Bytes between the shards of stages, if there are any."""
    if not weights and not gradients:
        return []
    return [("weights", format_bytes(weights)), ("weight gradients", format_bytes(gradients))]


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
