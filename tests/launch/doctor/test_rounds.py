"""Rounds in which links are measured: every pair once, no host twice in a round."""

from itertools import combinations

import pytest

from thinpipe.launch.doctor.links import Progress, own_links, rounds


@pytest.mark.parametrize("hosts", [1, 2, 3, 7, 8, 16])
def test_every_pair_meets_once_and_no_host_is_twice_in_a_round(hosts: int) -> None:
    found = rounds(hosts)
    met = [pair for pairs in found for pair in pairs]
    assert sorted(met) == list(combinations(range(hosts), 2))
    assert len(found) == hosts - 1 + hosts % 2
    for pairs in found:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("hosts", [2, 5, 16])
def test_hosts_that_follow_their_own_order_never_wait_for_each_other_in_a_circle(
    hosts: int,
) -> None:
    order = [list(own_links(host, hosts)) for host in range(hosts)]
    done = 0
    while any(order):
        ready = {
            links[0]
            for links in order
            if links and all(order[end][0] == links[0] for end in links[0])
        }
        assert ready, "every host waits for another one"
        for link in ready:
            for end in link:
                assert order[end].pop(0) == link
        done += len(ready)
    assert done == hosts * (hosts - 1)


def test_progress_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(4, said.append)
    for _ in range(4):
        now[0] += 3
        progress.advance("host0 -> host1")
    assert said == ["measured 2 of this host's 4 links, the last host0 -> host1; 6 s left"]
