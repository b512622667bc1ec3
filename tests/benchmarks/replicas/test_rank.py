"""Replicas whose compute is slept: every form of exchange once on loopback."""

from dataclasses import replace

import pytest
import torch

from benchmarks.links.runners import METHODS as CUTS
from benchmarks.links.workloads import PaperShape
from benchmarks.replicas.rank import DDP, Method, Plan, RankResult, run_rank
from tests.ranks import run_ranks
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES

pytestmark = pytest.mark.dist
METHODS = (
    Method("none", "none", {}),
    Method("fp32", "allreduce", {}),
    Method("bf16", "allreduce", {"format": "bf16"}),
    Method("cocktail", "cocktail", {}),
)
ALONE = Plan(METHODS, [None], 1, parameters=10_000, compute_s=0.01)
SMALL = PaperShape(tokens=4, width=16, microbatches=2, forward_s=0.001, backward_s=0.002)
CUT = next(cuts for cuts in CUTS if cuts.name == "aqsgd fw3/bw6")
JOINT = replace(ALONE, methods=[replace(method, cuts=CUT) for method in METHODS[2:]], shape=SMALL)


def unlimited(rate_bps: float | None) -> None:
    """The ranks of a test talk over loopback."""


def measure(rank: int, plan: Plan) -> list[RankResult]:
    return run_rank(plan, unlimited)


def test_every_method_runs_between_two_replicas() -> None:
    for rows in run_ranks(2, measure, ALONE):
        sent = {row.method: row.sync_nbytes for row in rows}
        assert sent["none"] == 0
        assert sent["fp32"] == 4 * 10_000 + 2 * EXCHANGE_HEADER_NBYTES
        assert sent["bf16"] == 2 * 10_000 + 2 * EXCHANGE_HEADER_NBYTES
        assert 0 < sent["cocktail"] < 1000
        assert all(row.steps_s[0] > 0.01 for row in rows)


def test_torchs_own_runs_between_two_replicas() -> None:
    given = {"fp32": torch.float32, "bf16": torch.bfloat16}
    how = [Method(name, DDP, {"mb": 0.01, "dtype": dtype}) for name, dtype in given.items()]
    for rows in run_ranks(2, measure, replace(ALONE, methods=how)):
        assert [row.method for row in rows] == [*given]
        assert all(row.steps_s[0] > 0.01 for row in rows)
        assert not any(row.cut_nbytes for row in rows)


@pytest.mark.slow
def test_methods_run_between_two_pipelines() -> None:
    for rows in run_ranks(4, measure, JOINT):
        assert [row.method for row in rows] == ["bf16", "cocktail"]
        assert all(row.sync_nbytes > 0 for row in rows)
        assert all(row.cut_nbytes > 0 for row in rows)
