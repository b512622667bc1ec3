"""The link benchmark's arithmetic, and every method once on a small pipeline."""

from dataclasses import replace

import pytest
import torch

from benchmarks.harness import Row
from benchmarks.links.__main__ import _arguments, _plan
from benchmarks.links.ranks import Plan, RankResult, run_rank
from benchmarks.links.rows import Circumstances, make_row, measure_messages, with_references
from benchmarks.links.runners import METHODS, Method, ThinPipeRunner
from benchmarks.links.workloads import PaperShape
from tests.ranks import run_ranks
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.wire.header import HEADER_NBYTES

SMALL = PaperShape(tokens=4, width=16, microbatches=4, forward_s=0.001, backward_s=0.002)
BY_NAME = {method.name: method for method in METHODS}


def unlimited(rate_bps: float | None) -> None:
    """The ranks of a test talk over loopback."""


def measure(rank: int, methods: list[Method]) -> list[RankResult]:
    return run_rank(Plan(SMALL, methods, [None, 1e9], steps=2), unlimited)


@pytest.mark.slow
@pytest.mark.dist
def test_every_method_runs_and_sends_what_its_messages_say() -> None:
    by_rank = run_ranks(3, measure, list(METHODS))
    for first, _, last in zip(*by_rank, strict=True):
        method = BY_NAME[first.method]
        for sent, message in zip((first, last), measure_messages(method, SMALL), strict=True):
            if method.name.startswith("transform"):  # as short as its values let it be
                assert SMALL.microbatches * HEADER_NBYTES < sent.nbytes
                assert sent.nbytes < 4 * SMALL.microbatches * SMALL.boundary.numel()
            else:
                assert sent.nbytes == SMALL.microbatches * message.nbytes
        assert (first.first_visit_s is not None) == method.remembers
        assert min(first.steps_s) >= 4 * (0.001 + 0.002)


def test_slept_stages_give_values_like_those_of_training() -> None:
    """Few directions, and little change between visits: less in activations than in gradients."""
    stage = replace(SMALL, tokens=256, width=64).module(0, 2, torch.float32)
    for give, change in ((stage.next_output, 0.1), (stage.next_gradient, 0.3)):
        found = []
        for _ in range(3):
            stage.begin_step(torch.arange(4))
            found.append(give().flatten())
        cosine = float(torch.cosine_similarity(found[0], found[1], dim=0))
        assert cosine == pytest.approx(1 / (1 + change**2), abs=0.02)
        assert not torch.equal(found[0], found[1])
        energy_D = torch.linalg.svdvals(found[0].view(256, 64)).square()
        assert 0.25 < float(energy_D[:6].sum() / energy_D.sum()) < 0.9  # of white values: 0.15


def test_a_message_of_a_known_sample_has_the_bits_of_its_method() -> None:
    activations, gradients = measure_messages(BY_NAME["aqsgd fw3/bw6"], SMALL)
    values, scales = 4 * 16, 2 * 4
    assert activations.nbytes == HEADER_NBYTES + values * 3 // 8 + scales
    assert gradients.nbytes == HEADER_NBYTES + values * 6 // 8 + scales
    assert measure_messages(BY_NAME["torch 1F1B bf16"], SMALL) == (Message(128), Message(128))


def forwards_ahead(rank: int, depth: int) -> int:
    """Forwards of a stage before its first backward."""
    method = replace(BY_NAME["fp32"], depth=depth)
    runner = ThinPipeRunner(method, SMALL, GlooTransport(2, 1, timeout_s=120))
    runner.step(1, torch.arange(SMALL.microbatches))
    computed = [event.kind for event in runner.stage.events() if event.kind in ("F", "B")]
    return computed.index("B")


@pytest.mark.dist
def test_the_schedule_is_as_deep_as_asked_for() -> None:
    assert run_ranks(2, forwards_ahead, 1) == [3, 1]


def test_the_depth_that_is_asked_for_is_that_of_rows_and_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["links", "--depth", "1", "--methods", "fp32"])
    (method,) = _plan(_arguments()).methods
    assert method.depth == 1
    shallow, deep = (row(replace(method, depth=depth), 8e6, 4.0, 8) for depth in (0, 2))
    assert (shallow.detail["depth"], deep.detail["depth"]) == (0, 2)
    assert bound_s(deep) < bound_s(shallow)


def bound_s(row: Row) -> float:
    found = row.numbers["bound s"]
    assert found is not None
    return found


def row(method: Method, rate_bps: float | None, seconds: float, microbatches: int = 1) -> Row:
    nbytes = 1_000_000
    ranks = [
        RankResult(method.name, rate_bps, (seconds, 9.0, seconds), None, nbytes),
        RankResult(method.name, rate_bps, (seconds / 2,) * 3, None, nbytes // 2),
    ]
    shape = PaperShape(
        tokens=100, width=1, microbatches=microbatches, forward_s=0.5, backward_s=0.5
    )
    at = Circumstances(delay_s=0.0, probe=0.95, load=1.0)
    messages = (Message(nbytes), Message(0))
    return make_row(method, ranks, shape, messages, at)


def test_a_row_joins_the_ranks_and_knows_its_bound() -> None:
    found = row(BY_NAME["fp32"], 8e6, 4.0)
    assert found.conditions == {"stages": 2, "delay ms": 0, "rate": "8 Mbit/s"}
    assert found.numbers == pytest.approx(
        {
            "step s": 4,
            "bound s": 2 + 1 / PAYLOAD_SHARE,
            "bound/step": bound_s(found) / 4,
            "tokens/s": 25,
            "link use": 1 / PAYLOAD_SHARE / 4,
            "first visit s": None,
            "wire MB": 1.5,
            "probe": 0.95,
        }
    )


def test_rows_are_compared_on_the_same_link_and_without_a_limit() -> None:
    fp32, bf16 = BY_NAME["fp32"], BY_NAME["bf16"]
    rows = [row(fp32, None, 1.0), row(fp32, 8e6, 4.0), row(bf16, 8e6, 2.0)]
    free, slow, other = with_references(rows)
    assert (slow.numbers["of free"], slow.numbers["x fp32"]) == (0.25, 1)
    assert (other.numbers["of free"], other.numbers["x fp32"]) == (None, 2)
    assert (free.numbers["of free"], free.numbers["x fp32"]) == (1, 1)
