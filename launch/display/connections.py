"""The connections between all machines of a run as they are now: a table, few lines, or one."""

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rich.table import Table
from rich.text import Text

from thinpipe.launch.report.edge_news import EdgeNews
from thinpipe.launch.report.edge_trace import EdgeNow, EdgeTrace
from thinpipe.launch.words import NOTHING, format_bytes, format_round_trip

_SILENT_S = 1.0
_OLD_S = 10.0
"""Older rates are not those of now."""
_FEW = 8
"""As many connections are all shown; of more, those that carry next to nothing are counted only."""
_IDLE = 0.01
"""Of the bytes of the busiest one: heartbeats and control messages."""


@dataclass(frozen=True)
class Connection:
    """Both directions between two machines; pairs are (first to second, second to first).

    `age_s` is how long ago one of them told it.
    """

    first: str
    second: str
    Bps: tuple[float, float]
    nbytes: tuple[int, int]
    round_trip_s: float
    resent: int
    resumed: int
    silence_s: float
    age_s: float

    @property
    def mbps(self) -> tuple[str, str]:
        """The rates of both directions, in Mbit/s."""
        there, back = (NOTHING if self.is_old else f"{8e-6 * rate:,.1f}" for rate in self.Bps)
        return there, back

    @property
    def is_old(self) -> bool:
        """Whether what is known is not of now."""
        return self.age_s > _OLD_S

    @property
    def problem(self) -> str | None:
        """What is wrong now."""
        if self.is_old:
            return f"no news for {self.age_s:.0f} s"
        return f"silent {self.silence_s:.0f} s" if self.silence_s > _SILENT_S else None

    @property
    def trouble(self) -> str:
        """What went wrong so far, and now."""
        counts = ((self.resent, "resent"), (self.resumed, "resumed"))
        found = [f"{count:,} {what}" for count, what in counts if count]
        return ", ".join([*found, *([self.problem] if self.problem else [])]) or NOTHING


class Connections:
    """Those of this host, as its `trace` has them, and with `news` those of all hosts."""

    def __init__(self, trace: EdgeTrace, news: EdgeNews | None = None) -> None:
        self._trace, self._news = trace, news

    @property
    def host(self) -> str:
        """The name of this host; empty where there is no other."""
        return self._trace.host

    def now(self) -> list[Connection]:
        """This host's first, in the order of hosts."""
        own, now_s = self._trace.edges(), time.monotonic()
        heard = self._news.heard if self._news is not None else {}
        seen = {(self.host, edge.target): (0.0, edge) for edge in own}
        for name, (heard_s, edges) in list(heard.items()):
            seen |= {(name, edge.target): (now_s - heard_s, edge) for edge in edges}
        hosts = [self.host, *(edge.target for edge in own)]
        return [
            _connection(one, other, seen.get((one, other)), seen.get((other, one)))
            for one, other in combinations(hosts, 2)
            if (one, other) in seen or (other, one) in seen
        ]


def _connection(
    first: str,
    second: str,
    there: tuple[float, EdgeNow] | None,
    back: tuple[float, EdgeNow] | None,
) -> Connection:
    """From what the first, the second, or both see of it."""
    ends = [end for end in (there, back) if end is not None]
    age_s, latest = min(ends, key=lambda end: end[0])
    told_now = [edge for end_s, edge in ends if end_s <= _OLD_S]
    rates = latest.sent_Bps, latest.received_Bps
    nbytes = latest.sent_nbytes, latest.received_nbytes
    if latest.target == first:
        rates, nbytes = rates[::-1], nbytes[::-1]
    return Connection(
        first=first,
        second=second,
        Bps=rates,
        nbytes=nbytes,
        round_trip_s=latest.round_trip_s,
        resent=sum(edge.retransmitted for _, edge in ends),  # each counts what it sent
        resumed=max(edge.resumed for _, edge in ends),
        silence_s=max((edge.silence_s for edge in told_now), default=0.0),
        age_s=age_s,
    )


def in_use(connections: Sequence[Connection]) -> tuple[list[Connection], int]:
    """Those worth a line each, and how many others carry next to nothing."""
    least = _IDLE * max((sum(c.nbytes) for c in connections), default=0)
    used = [c for c in connections if sum(c.nbytes) > least or c.problem]
    shown = list(connections) if len(connections) <= _FEW else used
    return shown, len(connections) - len(shown)


def connection_table(connections: Sequence[Connection]) -> Table:
    """A row per connection."""
    shown, idle = in_use(connections)
    table = Table(box=None, show_edge=False, pad_edge=False, expand=True, header_style="dim")
    table.add_column("connection", overflow="fold", min_width=12)
    for header in ("Mbit/s →", "←", "bytes →", "←", "round trip"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("trouble", justify="right")
    for connection in shown:
        table.add_row(
            f"{connection.first} ⇄ {connection.second}",
            *connection.mbps,
            *map(format_bytes, connection.nbytes),
            format_round_trip(connection.round_trip_s),
            connection.trouble,
            style="bold red" if connection.problem else None,
        )
    if idle:
        table.add_row(Text(f"{idle} more, almost idle", style="dim"))
    return table


def brief_connections(connections: Sequence[Connection], most: int) -> Table:
    """A cell for each of `most` connections at most, those in trouble first, in two columns."""
    shown, left = in_use(connections)
    if len(shown) > most:
        by_need = sorted(shown, key=lambda c: (c.problem is None, -sum(c.nbytes)))
        kept = by_need[: most - 1]
        left += len(shown) - len(kept)
        shown = [connection for connection in shown if connection in kept]
    cells = [_cell(connection) for connection in shown]
    if left:
        cells.append(Text(f"and {left} more", style="dim"))
    columns = 2 if len(cells) > 2 else 1
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column(ratio=1)
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    return grid


def _cell(connection: Connection) -> Text:
    there, back = connection.mbps
    text = Text(f"{connection.first} ", style="dim")
    style = "bold red" if connection.problem else "bold"
    text.append(f"{there}→ ←{back}", style=style)
    text.append(f" {connection.second} ")
    text.append(connection.problem or format_round_trip(connection.round_trip_s), style=style)
    return text


class ConnectionLines:
    """The mean rates since the time before, of every direction that carries something."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()
        self._nbytes: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def age_s(self) -> float:
        """How long ago the time before was; the first is when this was made."""
        return time.monotonic() - self._told_s

    def tell(self, connections: Sequence[Connection]) -> str:
        """Lines of 80 columns."""
        seconds = self.age_s
        shown, idle = in_use(connections)
        parts = [self._part(connection, seconds) for connection in shown]
        if idle:
            parts.append(f"{idle} more almost idle")
        self._told_s += seconds
        self._nbytes = {(c.first, c.second): c.nbytes for c in connections}
        return textwrap.fill(
            f"Mbit/s, mean of {seconds:.0f} s: {'; '.join(parts)}",
            width=80,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )

    def _part(self, connection: Connection, seconds: float) -> str:
        pair = connection.first, connection.second
        before = self._nbytes.get(pair, (0, 0))
        there, back = (
            f"{8e-6 * max(0, now - then) / seconds:,.1f}"
            for now, then in zip(connection.nbytes, before, strict=True)
        )
        problem = f" ({connection.problem})" if connection.problem else ""
        return f"{pair[0]} → {pair[1]} {there}, back {back}{problem}"
