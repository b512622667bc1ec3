"""Prints the results of all checks and the links as a matrix."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thinpipe.launch.doctor.links import LinkInfo
from thinpipe.launch.doctor.result import CheckResult
from thinpipe.launch.host.links import MAX_RATE_BPS, MIN_RATE_BPS, PAYLOAD_SHARE, format_rate
from thinpipe.launch.host.network import Host, Network, Rate

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def show_results(console: Console, results: Sequence[CheckResult]) -> None:
    """Print all results, the worst last, so that they stay visible in a terminal."""
    order = list(_STYLES)
    for result in sorted(results, key=lambda f: order.index(f.level)):
        head = f"[{_STYLES[result.level]}]{result.level:7}[/] {result.where}: "
        console.print(head, end="", highlight=False)
        console.print(result.text, markup=False, highlight=False, soft_wrap=True)
        if result.remedy:
            console.print(f"        -> {result.remedy}", markup=False, soft_wrap=True)


def show_links(console: Console, names: Sequence[str], links: Sequence[LinkInfo]) -> None:
    """Rate and round trip: a row per sender, a column per receiver."""
    table = Table("from \\ to", *names, title="payload rate, round trip", title_justify="left")
    by_pair = {(link.source, link.target): link for link in links}
    for source, name in enumerate(names):
        cells = [_cell(by_pair.get((source, target))) for target in range(len(names))]
        table.add_row(name, *cells)
    console.print(table)


def as_network(links: Sequence[LinkInfo], known: tuple[Host, ...]) -> Network:
    """The network of these hosts as `plan` reads it; a closed link has the lowest rate.

    Latency is half of a round trip.
    """
    hosts = len(known)
    rates: list[list[Rate]] = [[None] * hosts for _ in range(hosts)]
    delays = [[0.0] * hosts for _ in range(hosts)]
    for link in links:
        nominal_bps = link.rate_bps / PAYLOAD_SHARE
        rates[link.source][link.target] = min(max(nominal_bps, MIN_RATE_BPS), MAX_RATE_BPS)
        delays[link.source][link.target] = link.round_trip_s / 2
    return Network(tuple(map(tuple, rates)), tuple(map(tuple, delays)), known)


def _cell(link: LinkInfo | None) -> str:
    if link is None:
        return ""
    if link.closed:
        return "closed"
    return f"{format_rate(link.rate_bps)}, {link.round_trip_s * 1e3:.3g} ms"
