"""Connections between hosts in the summary."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from thinpipe.launch.view.report.edges import (
    edge_cells,
    edge_table,
    edges_of,
    read_edges,
    traces_of,
    write_traces,
)

LINK = {
    "sent_nbytes": 2_500_000,
    "round_trip_s": 0.05,
    "retransmitted": 1234,
    "resumed": 2,
    "longest_silence_s": 4.25,
    "bbr": True,
}


def test_every_host_says_what_it_sent_and_ranks_without_a_relay_nothing() -> None:
    quiet = {**LINK, "resumed": 0}
    hosts = [{"name": "a", "links": {"b": LINK}}, None, {"name": "b", "links": {"a": quiet}}]
    edges = edges_of(hosts)
    assert [(edge["source"], edge["target"], edge["resumed"]) for edge in edges] == [
        ("a", "b", 2),
        ("b", "a", 0),
    ]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(edge_table(edges))
    (row,) = (line for line in shown.get().splitlines() if line.strip().startswith("a → b"))
    assert row.split()[3:] == ["2.50", "MB", "-", "50.0", "ms", "1,234", "2", "4.2", "s"]


def test_the_mean_rate_is_weighted_by_time_and_read_back(tmp_path: Path) -> None:
    trace = [
        {"target": target, "seconds": seconds, "sent_Bps": rate}
        for target, seconds, rate in (("b", 1.0, 4e6), ("c", 1.0, 9e9), ("b", 3.0, 8e6))
    ]
    host = {"name": "a", "links": {"b": LINK}, "trace": trace}
    (edge,) = edges_of([host])
    assert edge["mean_Bps"] == pytest.approx(7e6)
    assert edge_cells(edge)[3] == "56.0"
    (tmp_path / "summary.json").write_text(json.dumps({"edges": [edge]}))
    write_traces(tmp_path, traces_of([host]))
    assert read_edges(tmp_path) == ([edge], {"a": trace})
    assert read_edges(tmp_path / "none") == ([], {})
