"""The connections between a run's hosts: what crossed each way, and how often it was disturbed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from rich import box
from rich.table import Table

from thinpipe.launch.host.words import NOTHING, format_bytes, format_round_trip
from thinpipe.launch.view.report.edge_trace import EdgeSample

FILE_NAME = "edges.json"
Traces: TypeAlias = Mapping[str, Sequence[EdgeSample]]
"""Samples of each host's connections over time, by the host's name."""


class Edge(TypedDict):
    """One direction between two hosts, over the whole run.

    `bytes` left the source, with everything that encryption, framing and repetition add, and
    `mean_Bps` is their rate while the run was trained, None if that took less than a second;
    `retransmitted` are TCP segments sent again, `resumed` counts connections that took over from
    a broken one.
    """

    source: str
    target: str
    bytes: int
    mean_Bps: float | None
    round_trip_s: float
    retransmitted: int
    resumed: int
    longest_silence_s: float


def traces_of(hosts: Sequence[Mapping[str, Any] | None]) -> Traces:
    """From what every host's relay says, with the samples of its `EdgeTrace` as "trace"."""
    return {host["name"]: host["trace"] for host in hosts if host is not None}


def write_traces(folder: Path, traces: Traces) -> None:
    """Write `edges.json` to a run folder."""
    (folder / FILE_NAME).write_text(json.dumps(traces), encoding="utf-8")


def edges_of(hosts: Sequence[Mapping[str, Any] | None]) -> list[Edge]:
    """From what every host's relay says of its links (`overlay.ranks.relay_status`)."""
    return [
        Edge(
            source=host["name"],
            target=peer,
            bytes=link["sent_nbytes"],
            mean_Bps=_mean_rate(host.get("trace", ()), peer),
            round_trip_s=link["round_trip_s"],
            retransmitted=link["retransmitted"],
            resumed=link["resumed"],
            longest_silence_s=link["longest_silence_s"],
        )
        for host in hosts
        if host is not None
        for peer, link in host["links"].items()
    ]


def read_edges(folder: Path) -> tuple[list[Edge], Traces]:
    """The connections that a run folder knows of; none if the run has not written them."""
    try:
        edges = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["edges"]
        known = [edge for edge in edges if edge.keys() == Edge.__required_keys__]
        return known, json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # or another version's
        return [], {}


def _mean_rate(samples: Sequence[EdgeSample], target: str) -> float | None:
    own = [sample for sample in samples if sample["target"] == target]
    seconds = sum(sample["seconds"] for sample in own)
    return sum(s["sent_Bps"] * s["seconds"] for s in own) / seconds if seconds else None


def edge_table(edges: Sequence[Edge]) -> Table:
    """A row per direction between two hosts."""
    table = Table(box=box.HORIZONTALS, header_style="bold", pad_edge=False)
    table.add_column("connection")
    for header in ("sent", "Mbit/s", "round trip", "resent", "resumed", "longest\nsilence"):
        table.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    for edge in edges:
        source, target, *numbers = edge_cells(edge)
        table.add_row(f"{source} → {target}", *numbers)
    return table


def edge_cells(edge: Edge) -> list[str]:
    """Columns of a table of connections: from, to, sent, rate, round trip, what went wrong."""
    return [
        edge["source"],
        edge["target"],
        format_bytes(edge["bytes"]),
        NOTHING if edge["mean_Bps"] is None else f"{8e-6 * edge['mean_Bps']:,.1f}",
        format_round_trip(edge["round_trip_s"]),
        f"{edge['retransmitted']:,}",
        f"{edge['resumed']:,}",
        f"{edge['longest_silence_s']:.1f} s",
    ]
