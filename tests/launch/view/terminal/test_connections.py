"""What this host's connections do is shown while it runs."""

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.launch.view.terminal.test_panel import info, record, trace
from thinpipe.launch.view.report.edge_trace import EdgeNow
from thinpipe.launch.view.terminal import connections, log
from thinpipe.launch.view.terminal.connections import ConnectionLines, connection_grid


def many(hosts: int) -> list[EdgeNow]:
    """Host 0 talks with its neighbour; the last one is silent."""
    return [
        EdgeNow(
            f"host{b}", 1e6 * b, 2e6 * b, *((10**9,) * 2 if b == 1 else (10**4,) * 2),
            0.0512, 3.0 if b == hosts - 1 else 0.1,
        )
        for b in range(1, hosts)
    ]  # fmt: skip


def test_lines_have_the_mean_rate_of_every_direction_and_count_the_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter((100.0, 110.0, 130.0))
    monkeypatch.setattr(connections.time, "monotonic", lambda: next(seconds))
    lines = ConnectionLines()
    assert lines.tell("host0", many(2)) == (
        "  Mbit/s, mean of 10 s: host0 → host1 800.0, back 800.0 (silent 3 s)"
    )
    first, *rest = many(12)
    text = lines.tell("host0", [first._replace(sent_nbytes=1_100_000_000), *rest])
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    text = " ".join(line.strip() for line in text.splitlines())
    assert text.startswith("Mbit/s, mean of 20 s: host0 → host1 40.0, back 0.0; host0 → host11 0.0")
    assert text.endswith("back 0.0 (silent 3 s); 9 more almost idle")


@pytest.mark.parametrize("interval_s", [0.0, 1000.0])
def test_a_log_has_them_now_and_then(interval_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "CONNECTIONS_INTERVAL_S", interval_s)
    console = Console(width=80)
    run = info(2)
    view = log.Log(run, console, trace(2))
    with console.capture() as shown:
        view.step(record(run))
    assert ("host0 → host1 " in shown.get()) is (not interval_s)


@pytest.mark.parametrize("most", [1, 2, 8])
def test_those_in_trouble_are_shown_first_and_the_rest_is_counted(most: int) -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(connection_grid("host0", many(12), most))
    text = shown.get()
    assert ("host0 11.0→ ←22.0" not in text) if most == 1 else ("silent 3 s" in text)
    assert f"and {11 - text.count('host0')} more" in text
