"""What connections do over time: sampled, merged when there is much of it, shown and drawn."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.waiting import until
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.view.report import edge_trace
from thinpipe.launch.view.report.content import edge_charts
from thinpipe.launch.view.report.edge_trace import EdgeTrace
from thinpipe.launch.view.report.edges import traces_of


def relay(limit: int) -> Callable[[], dict[str, Any]]:
    """A relay that has sent 1 MB and resumed once more whenever it is asked."""
    asked = count()

    def status() -> dict[str, Any]:
        number = next(asked)
        if number > limit:
            raise OverlayError("gone")
        link = {
            "sent_nbytes": number * 1_000_000,
            "received_nbytes": number * 500_000,
            "round_trip_s": 0.05,
            "retransmitted": 2 * number,
            "resumed": number,
            "silence_s": 4.0 if number >= limit else 0.1,
        }
        return {"name": "a", "links": {"b": link}}

    return status


def traced(limit: int, monkeypatch: pytest.MonkeyPatch, *most: int) -> EdgeTrace:
    monkeypatch.setattr(edge_trace, "_PERIOD_S", 0.01)
    with EdgeTrace(relay(limit), *most) as trace:
        thread = trace._thread
        assert thread is not None
        until(lambda: not thread.is_alive())
    return trace


def test_every_second_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(10, monkeypatch)
    assert len(trace.samples) == 10
    assert sum(sample["resumed"] for sample in trace.samples) == 10
    for sample in trace.samples:
        assert sample["sent_Bps"] * sample["seconds"] == pytest.approx(1e6)
        assert sample["retransmitted"] == 2
    (edge,) = trace.edges()
    assert edge[:1] + edge[3:] == ("b", 10_000_000, 5_000_000, 0.05, 4.0)
    assert edge.sent_Bps == pytest.approx(2 * edge.received_Bps)


def test_long_runs_are_merged_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(40, monkeypatch, 8)
    assert 4 <= len(trace.samples) < 8
    assert sum(sample["sent_Bps"] * sample["seconds"] for sample in trace.samples) == pytest.approx(
        40e6
    )
    assert sum(sample["retransmitted"] for sample in trace.samples) == 80
    assert max(sample["silence_s"] for sample in trace.samples) == 4.0
    ends = [sample["end_s"] for sample in trace.samples]
    assert ends == sorted(ends)


def test_without_a_relay_there_is_nothing() -> None:
    with EdgeTrace(lambda: None) as trace:
        pass
    assert trace.samples == trace.edges() == []


def test_traces_of_all_hosts_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = traced(5, monkeypatch).samples
    for number, sample in enumerate(samples):
        sample["end_s"] = number
    traces = traces_of([{"name": "a", "trace": samples}, None, {"name": "b", "trace": []}])
    assert list(traces) == ["a", "b"]
    (chart,) = edge_charts(traces)
    assert [line["label"] for line in chart["lines"]] == ["a \N{RIGHTWARDS ARROW} b", "resumed"]
    assert chart["columns"]["step"] == [*range(len(samples))]
    assert None not in chart["columns"]["resumed"], "every sample was resumed"


def test_hosts_that_have_left_or_are_lost_are_no_silent_connections() -> None:
    counts = dict.fromkeys(("sent_nbytes", "received_nbytes", "retransmitted", "resumed"), 1)
    link = {**counts, "round_trip_s": 0.05, "silence_s": 40.0}
    links = {"b": {**link, "left": True}, "c": link, "d": {**link, "lost": "silent"}}
    trace = EdgeTrace(relay(0))
    for now_s in (1.0, 2.0):
        trace.add({"name": "a", "links": links}, now_s)
    assert [edge.target for edge in trace.edges()] == ["c"]
