"""The replicas benchmark: its arithmetic, and every method once on loopback."""

from dataclasses import replace

import pytest

from benchmarks.links.workloads import PaperShape
from benchmarks.replicas.rank import Plan, RankResult, ping_rank, run_rank
from benchmarks.replicas.run import (
    END_TO_END_METHODS,
    OVERLAPPED_METHODS,
    REPLICA_METHODS,
    make_row,
    scaled_rate,
    table,
)
from tests.ranks import Ranks
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES

ALONE = Plan(REPLICA_METHODS, [None], 1, parameters=10_000, compute_s=0.01)
SMALL = PaperShape(tokens=4, width=16, microbatches=2, forward_s=0.001, backward_s=0.002)
JOINT = replace(ALONE, methods=END_TO_END_METHODS, shape=SMALL)


def unlimited(rate_bps: float | None) -> None:
    """The ranks of a test talk over loopback."""


def measure(rank: int, plan: Plan) -> list[RankResult]:
    return run_rank(plan, unlimited)


def ping(rank: int) -> dict[str, list[float]]:
    return ping_rank(400_000_000, 3)


def test_the_published_setting_is_scaled_to_the_plan() -> None:
    rate_bps = scaled_rate(ALONE, 500e6)
    assert 8 * 2 * 10_000 / rate_bps == pytest.approx(22 * 0.01)
    ranks = [RankResult("x", rate_bps, (s, 2.0, 3.0), 100, 0) for s in (1.0, 4.0)]
    row = make_row(ALONE, ranks)
    assert row.stands_for_bps == pytest.approx(500e6)
    assert row.steps_s == (4.0, 2.0, 3.0)
    assert row.step_s == 3.0


@pytest.mark.dist
def test_every_method_runs_between_two_replicas(ranks: Ranks) -> None:
    first, second = ranks(2, measure, ALONE)
    rows = [make_row(ALONE, pair) for pair in zip(first, second, strict=True)]
    sent = {row.method: row.sync_nbytes for row in rows}
    assert sent["none"] == 0
    assert sent["all-reduce fp32"] == 4 * 10_000 + 2 * EXCHANGE_HEADER_NBYTES
    assert sent["all-reduce bf16"] == 2 * 10_000 + 2 * EXCHANGE_HEADER_NBYTES
    assert 0 < sent["cocktail"] < 1000
    assert all(row.step_s > 0.01 for row in rows)
    assert len(table(rows).splitlines()) == 2 + len(REPLICA_METHODS)


@pytest.mark.slow
@pytest.mark.dist
def test_rare_exchanges_are_averaged_over_their_interval(ranks: Ranks) -> None:
    plan = replace(ALONE, methods=OVERLAPPED_METHODS, steps=60, compute_s=0.001, replicas=3)
    rows = [make_row(plan, group) for group in zip(*ranks(3, measure, plan), strict=True)]
    sent = {row.method: row.sync_nbytes for row in rows}
    assert sent["none"] == 0
    assert 0 < sent["SparseLoCo"] < sent["streaming DiLoCo, 4 bits"] < sent["ef_updates"]
    assert all(row.step_s == pytest.approx(sum(row.steps_s) / 60) for row in rows)


@pytest.mark.dist
def test_every_method_runs_between_two_pipelines(ranks: Ranks) -> None:
    everyone = ranks(4, measure, JOINT)
    rows = [make_row(JOINT, four) for four in zip(*everyone, strict=True)]
    assert [row.method for row in rows] == [method.label for method in END_TO_END_METHODS]
    assert all(row.cut_nbytes > 0 for row in rows)


@pytest.mark.dist
def test_pings_are_timed_beside_an_exchange(ranks: Ranks) -> None:
    found, _ = ranks(2, ping)
    counts = {what: len(times) for what, times in found.items()}
    assert counts == {"alone": 3, "beside an exchange": 3}
