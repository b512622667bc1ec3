"""How much of what nobody waits for may be under way."""

from dataclasses import replace

import pytest

from thinpipe.launch.net.overlay.links.tcp import TcpState

FAST = TcpState(
    round_trip_s=0.04,
    usual_round_trip_s=0.045,
    retransmitted=0,
    last_answer_s=0.0,
    path_mtu=1500,
    rate_Bps=10_000_000,
    under_way_nbytes=0,
)
"""400 kB fill its path."""


@pytest.mark.parametrize(
    ("usual_round_trip_s", "is_shared", "most_nbytes"),
    [(0.045, False, 450_000), (0.07, False, 50_000), (0.045, True, 50_000)],
)
def test_an_eighth_of_a_path_is_filled_where_others_wait(
    usual_round_trip_s: float, is_shared: bool, most_nbytes: int
) -> None:
    state = replace(FAST, usual_round_trip_s=usual_round_trip_s)
    for nbytes, has_room in ((most_nbytes - 1000, True), (most_nbytes + 1000, False)):
        assert replace(state, under_way_nbytes=nbytes).has_room(is_shared=is_shared) is has_room
    unknown = replace(state, round_trip_s=0.0, rate_Bps=0, under_way_nbytes=30_000)
    assert unknown.has_room(is_shared=True), "or a state would never come, and no rate be known"
