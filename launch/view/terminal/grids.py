"""Pieces of the panel and of the final tables: a run in words, labelled values."""

import textwrap
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from thinpipe.launch.view.report.metrics import RunInfo


def shape_of(info: RunInfo) -> str:
    """The run in a line, or in two that fit the panel: size, stages, schedule."""
    return textwrap.fill(", ".join(info.shape), width=76)


def labelled(pairs: Sequence[tuple[str, str]], columns: int) -> Table:
    """Lay out labels with their values behind them."""
    return in_columns(
        [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in pairs], columns
    )


def in_columns(cells: Sequence[Text], columns: int) -> Table:
    """Fill rows from the left."""
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column()
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    return grid
