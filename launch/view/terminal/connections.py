"""This host's connections now: a grid for the panel, lines for the log."""

import textwrap
import time
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from thinpipe.launch.host.words import format_round_trip
from thinpipe.launch.view.report.edge_trace import EdgeNow
from thinpipe.launch.view.terminal.grids import in_columns

_SILENT_S = 1.0  # two heartbeats (BEAT_S in overlay/links/link.py)
_FEW = 8  # up to this many connections are all shown; of more, nearly idle ones are only counted
_IDLE = 0.01  # of the bytes of the busiest one: heartbeats and control messages


def problem(edge: EdgeNow) -> str | None:
    """A connection's trouble, if it has any now."""
    return f"silent {edge.silence_s:.0f} s" if edge.silence_s > _SILENT_S else None


def in_use(edges: Sequence[EdgeNow]) -> tuple[list[EdgeNow], int]:
    """Those worth a place each, and how many others carry next to nothing."""
    least = _IDLE * max(map(_nbytes, edges), default=0)
    used = [edge for edge in edges if _nbytes(edge) > least or problem(edge)]
    shown = list(edges) if len(edges) <= _FEW else used
    return shown, len(edges) - len(shown)


def connection_grid(host: str, edges: Sequence[EdgeNow], most: int) -> Table:
    """A cell for each of `most` connections at most, those in trouble first, in two columns."""
    shown, left = in_use(edges)
    if len(shown) > most:
        by_need = sorted(shown, key=lambda edge: (problem(edge) is None, -_nbytes(edge)))
        kept = by_need[: most - 1]
        left += len(shown) - len(kept)
        shown = [edge for edge in shown if edge in kept]
    cells = [_cell(host, edge) for edge in shown]
    if left:
        cells.append(Text(f"and {left} more", style="dim"))
    return in_columns(cells, 2 if len(cells) > 2 else 1)


def _cell(host: str, edge: EdgeNow) -> Text:
    style = "bold red" if problem(edge) else "bold"
    rates = f"{8e-6 * edge.sent_Bps:,.1f}→ ←{8e-6 * edge.received_Bps:,.1f}"
    state = problem(edge) or format_round_trip(edge.round_trip_s)
    return Text.assemble((f"{host} ", "dim"), (rates, style), f" {edge.target} ", (state, style))


def _nbytes(edge: EdgeNow) -> int:
    return edge.sent_nbytes + edge.received_nbytes


class ConnectionLines:
    """The mean rates since the time before, of every direction that carries something."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()
        self._nbytes: dict[str, tuple[int, int]] = {}

    @property
    def age_s(self) -> float:
        """How long ago the time before was; the first is when this was made."""
        return time.monotonic() - self._told_s

    def tell(self, host: str, edges: Sequence[EdgeNow]) -> str:
        seconds = self.age_s
        shown, idle = in_use(edges)
        parts = [self._part(host, edge, seconds) for edge in shown]
        if idle:
            parts.append(f"{idle} more almost idle")
        self._told_s += seconds
        self._nbytes = {edge.target: (edge.sent_nbytes, edge.received_nbytes) for edge in edges}
        return textwrap.fill(
            f"Mbit/s, mean of {seconds:.0f} s: {'; '.join(parts)}",
            width=80,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )

    def _part(self, host: str, edge: EdgeNow, seconds: float) -> str:
        before = self._nbytes.get(edge.target, (0, 0))
        there, back = (
            f"{8e-6 * max(0, now - then) / seconds:,.1f}"
            for now, then in zip((edge.sent_nbytes, edge.received_nbytes), before, strict=True)
        )
        state = f" ({problem(edge)})" if problem(edge) else ""
        return f"{host} → {edge.target} {there}, back {back}{state}"
