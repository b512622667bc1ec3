"""Prints the results of all checks and the links as a matrix; writes a file and a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinpipe.launch.doctor.links import LinkInfo
from thinpipe.launch.doctor.result import CheckResult
from thinpipe.launch.host.links import MAX_RATE_BPS, MIN_RATE_BPS, PAYLOAD_SHARE, format_rate
from thinpipe.launch.host.network import Network, Rate

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


def as_network(hosts: int, links: Sequence[LinkInfo]) -> Network:
    """The network as `plan` reads it. Rates include headers; a closed link gets the lowest rate.

    Latency is half of a round trip.
    """
    rates: list[list[Rate]] = [[None] * hosts for _ in range(hosts)]
    delays = [[0.0] * hosts for _ in range(hosts)]
    for link in links:
        nominal_bps = link.rate_bps / PAYLOAD_SHARE
        rates[link.source][link.target] = min(max(nominal_bps, MIN_RATE_BPS), MAX_RATE_BPS)
        delays[link.source][link.target] = link.round_trip_s / 2
    return Network(tuple(map(tuple, rates)), tuple(map(tuple, delays)))


def draw_links(path: Path, names: Sequence[str], links: Sequence[LinkInfo]) -> None:
    """Draw the matrix: the darker, the slower."""
    from matplotlib.figure import Figure

    size = len(names)
    rates = [[float("nan")] * size for _ in range(size)]
    for link in links:
        rates[link.source][link.target] = link.rate_bps / 1e6
    figure = Figure(figsize=(1.6 + 1.2 * size, 1.2 + size), layout="constrained")
    axes = figure.subplots()
    axes.imshow(rates, cmap="Blues_r")
    for link in links:
        text = "closed" if link.closed else f"{link.rate_bps / 1e6:.3g} Mbit/s"
        text += "" if link.closed else f"\n{link.round_trip_s * 1e3:.3g} ms"
        style = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        axes.text(link.target, link.source, text, ha="center", va="center", bbox=style)
    axes.set_xticks(range(size), names)
    axes.set_yticks(range(size), names)
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    figure.savefig(path, dpi=120)


def _cell(link: LinkInfo | None) -> str:
    if link is None:
        return ""
    if link.closed:
        return "closed"
    return f"{format_rate(link.rate_bps)}, {link.round_trip_s * 1e3:.3g} ms"
