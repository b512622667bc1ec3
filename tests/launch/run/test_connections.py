"""What machines say of their connections while a run goes on."""

from typing import Any

import pytest
from torch.distributed import HashStore

from tests.waiting import until
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.run import connections
from thinpipe.launch.run.connections import Connections
from thinpipe.launch.view.report import edge_trace

LINK = {"received_nbytes": 0, "round_trip_s": 0.05, "retransmitted": 2, "resumed": 0,
        "silence_s": 0.1}  # fmt: skip


class Relay:
    """Of one of three machines; it has sent 1,000 bytes more to each whenever it is asked."""

    def __init__(self, name: str) -> None:
        self.name, self.sent, self.is_gone = name, 0, False

    def __call__(self) -> dict[str, Any]:
        if self.is_gone:
            raise OverlayError("gone")
        self.sent += 1000
        peers = {"a", "b", "c"} - {self.name}
        return {"name": self.name, "links": {p: {**LINK, "sent_nbytes": self.sent} for p in peers}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PERIOD_S", 0.01)
    monkeypatch.setattr(edge_trace, "_PERIOD_S", 0.01)


def test_rank_0_knows_of_all_machines_and_of_news() -> None:
    store, relays = HashStore(), [Relay(name) for name in "abc"]
    made = [
        Connections(2 * number, lambda: store, speaks=True, relay=relay)
        for number, relay in enumerate(relays)
    ]
    first, *others = made
    with made[0], made[1], made[2]:
        assert [each.tells for each in made] == [False, True, True]
        for each in made:
            each.follow([2, 4])

        def known() -> dict[str, Any]:
            return {host["name"]: host for host in first.all() if host is not None}

        until(lambda: [*known()] == ["a", "b", "c"])
        sent = known()["c"]["links"]["a"]["sent_nbytes"]
        until(lambda: known()["c"]["links"]["a"]["sent_nbytes"] > sent)
        until(lambda: len(known()["b"]["trace"]) > 4)
        assert known()["b"]["trace"][-1]["sent_Bps"] > 0
        relays[1].is_gone = True
        until(lambda: known()["b"]["age_s"] > 0.3)
        assert known()["c"]["age_s"] < 0.3
        assert others[0].own() is None


def test_a_trace_of_another_machine_stays_small() -> None:
    other, relay = connections._Other(), Relay("b")
    for second in range(500):
        other.add(float(second), relay())
        other.add(float(second), relay())
    trace = other.told()["trace"]
    assert 2 * 25 <= len(trace) <= 2 * 60
    assert sum(sample["seconds"] for sample in trace if sample["target"] == "a") == 499


def test_a_run_on_one_machine_asks_nobody() -> None:
    def never() -> HashStore:
        pytest.fail("there is nobody to tell or to ask")

    for rank, speaks in ((0, True), (1, False)):
        relay = (lambda: None) if speaks else Relay("a")
        with Connections(rank, never, speaks=speaks, relay=relay) as alone:
            assert not alone.tells
            alone.follow([])
            assert alone.all() == [None]
