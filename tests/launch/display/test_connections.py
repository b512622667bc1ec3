"""What the connections of all machines do is known where the run is shown, while it runs."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations, count
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from torch.distributed import TCPStore

from tests.launch.display.test_panel import info, of_all, record
from tests.waiting import until
from thinpipe.launch.display import connections, log
from thinpipe.launch.display.connections import (
    Connection,
    ConnectionLines,
    Connections,
    connection_table,
)
from thinpipe.launch.report import edge_news, edge_trace
from thinpipe.launch.report.edge_news import EdgeNews
from thinpipe.launch.report.edge_trace import EdgeTrace

HOSTS = ("a", "b", "c")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_trace, "_PERIOD_S", 0.02)
    monkeypatch.setattr(edge_news, "_PERIOD_S", 0.02)


def carrier(name: str) -> Callable[[], dict[str, Any]]:
    """It sends as many MB every time it is asked as the sum of its place and the other's squared.

    So every direction differs, and the rates of two have a known ratio.
    """
    asked = count()

    def status() -> dict[str, Any]:
        number, links = next(asked), {}
        for other in set(HOSTS) - {name}:
            one, two = HOSTS.index(name) + 1, HOSTS.index(other) + 1
            links[other] = {
                "sent_nbytes": number * (one + two**2) * 1_000_000,
                "received_nbytes": number * (two + one**2) * 1_000_000,
                "round_trip_s": 0.05,
                "retransmitted": number,
                "resumed": 0,
                "silence_s": 0.1,
            }
        return {"name": name, "links": links}

    return status


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_connections_are_shown_on_one_host(store: TCPStore) -> None:
    with ExitStack() as stack:
        seen = {}
        for name in HOSTS:
            trace = stack.enter_context(EdgeTrace(carrier(name)))
            news = EdgeNews(trace, store.clone, reads=name == "a")
            seen[name] = Connections(trace, stack.enter_context(news))
        until(lambda: len(seen["a"].now()) == 3)
        until(lambda: len(seen["b"].now()) == 2)
        found = {(c.first, c.second): c for c in seen["a"].now()}
        assert len(seen["b"].now()) == 2  # its own: it does not ask
    assert {frozenset(pair) for pair in found} == {frozenset(p) for p in ("ab", "ac", "bc")}
    for (first, second), c in found.items():
        one, two = HOSTS.index(first) + 1, HOSTS.index(second) + 1
        ratio = (one + two**2) / (two + one**2)
        assert c.Bps[0] / c.Bps[1] == pytest.approx(ratio, rel=1e-3)
        assert c.nbytes[0] / c.nbytes[1] == pytest.approx(ratio, rel=1e-3)
        assert c.problem is None


def test_a_host_that_is_silent_is_seen_from_the_other_end(store: TCPStore) -> None:
    """What it told last is not taken for what is now."""
    with EdgeTrace(carrier("a")) as trace, EdgeNews(trace, store.clone, reads=True) as news:
        with EdgeTrace(carrier("b")) as there, EdgeNews(there, store.clone, reads=False):
            until(lambda: "b" in news.heard)
        heard_s, edges = news.heard["b"]
        news.heard["b"] = (heard_s - 1000, edges)
        found = {frozenset((c.first, c.second)): c for c in Connections(trace, news).now()}
    assert found[frozenset("ab")].problem is None
    lost = found[frozenset("bc")]
    assert lost.mbps == ("-", "-")
    assert lost.trouble.endswith("no news for 1000 s")


def test_a_store_that_is_gone_ends_the_thread_only(store: TCPStore) -> None:
    def gone() -> TCPStore:
        raise RuntimeError("gone")

    with EdgeTrace(carrier("a")) as trace, EdgeNews(trace, gone, reads=True) as news:
        until(lambda: not news._thread.is_alive())
        until(lambda: len(Connections(trace, news).now()) == 2)


def many(hosts: int) -> list[Connection]:
    """Neighbours in a row talk; the last of them is silent."""
    found = []
    for a, b in combinations(range(hosts), 2):
        nbytes = 10**9 if b == a + 1 else 10**4
        silence_s = 3.0 if a == hosts - 2 else 0.1
        pair, rates, both = (f"host{a}", f"host{b}"), (1e6 * b, 2e6 * b), (nbytes, nbytes)
        found.append(Connection(*pair, rates, both, 0.0512, a, 0, silence_s, 0.0))
    return found


def test_lines_have_the_mean_rate_of_every_direction_and_count_the_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter((100.0, 110.0, 130.0))
    monkeypatch.setattr(connections.time, "monotonic", lambda: next(seconds))
    lines = ConnectionLines()
    first, rest = many(2), many(8)
    assert lines.tell(first) == (
        "  Mbit/s, mean of 10 s: host0 → host1 800.0, back 800.0 (silent 3 s)"
    )
    text = lines.tell([replace(rest[0], nbytes=(1_100_000_000, 1_000_000_000)), *rest[1:]])
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    text = " ".join(line.strip() for line in text.splitlines())
    assert text.startswith("Mbit/s, mean of 20 s: host0 → host1 40.0, back 0.0; host1 → host2 400")
    assert text.endswith("host6 → host7 400.0, back 400.0 (silent 3 s); 21 more almost idle")


@pytest.mark.parametrize("interval_s", [0.0, 1000.0])
def test_a_log_has_them_now_and_then(interval_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "CONNECTIONS_INTERVAL_S", interval_s)
    console = Console(width=80)
    run = info(2)
    view = log.Log(run, console, of_all(3, busy=False))
    with console.capture() as shown:
        view.step(record(run))
    assert ("host1 → host2 " in shown.get()) is (not interval_s)


def test_the_table_has_both_directions_and_what_went_wrong() -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(connection_table(many(3)))
    text = " ".join(shown.get().split())
    assert "host0 ⇄ host2 16.0 32.0 10.0 kB 10.0 kB 51.2 ms -" in text
    assert "host1 ⇄ host2 16.0 32.0 1.00 GB 1.00 GB 51.2 ms 1 resent, silent 3 s" in text
