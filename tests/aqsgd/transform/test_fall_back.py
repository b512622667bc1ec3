"""What a boundary decides as it goes: channels as they are, new bases, none that nobody needs."""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aqsgd.transform.ends import TOKENS, WIDTH, Source, ends, send, train, visit
from tests.often import mostly_slow
from thinpipe.aqsgd.transform import basis_search
from thinpipe.aqsgd.transform.boundary import TransformBoundary
from thinpipe.pipeline.comm.error_stats import error_stats


class Alike:
    """Samples that change in all dimensions alike, until they change in a few only."""

    def __init__(self, until: int) -> None:
        self._generator, self._until = torch.Generator().manual_seed(0), until
        self._base_BTD = torch.randn(8, TOKENS, WIDTH, generator=self._generator)

    def visit(self, step: int) -> Tensor:
        change_BTD = torch.randn(self._base_BTD.shape, generator=self._generator)
        if step >= self._until:
            change_BTD[..., 3:] = 0
        return self._base_BTD + 0.1 * change_BTD


def follow(
    sender: TransformBoundary, receiver: TransformBoundary, steps: range, until: int
) -> list[tuple[int, bool, float]]:
    """(bytes, whether channels are sent as they are, error) of every step."""
    source, found = Alike(until), []
    for step in range(steps.stop):
        x_BTD = source.visit(step)
        if step < steps.start:
            continue
        out_BTD, used = visit(sender, receiver, x_BTD, list(range(8)), step)
        plain = receiver.learned.version > 0 and receiver.learned.basis.order_D is not None
        found.append((used, plain, float((out_BTD - x_BTD).norm() / x_BTD.norm())))
    return found


@pytest.fixture
def small_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of tokens of 32 channels would take half a bit each where there is no basis, and a
    basis as much as a few messages.
    """
    monkeypatch.setattr(basis_search, "_SCALE_BITS", 0)
    monkeypatch.setattr(basis_search, "_ENTRY_BITS", 0)


@pytest.mark.usefixtures("small_costs")
def test_where_a_basis_gains_little_channels_are_sent_as_they_are() -> None:
    """Both ends change over at the same message, keep their caches, and can change back."""
    found = follow(*ends(), range(36), until=6)
    assert all(plain for _, plain, _ in found[1:6])
    assert not found[-1][1]
    assert all(error < 0.1 for _, _, error in found)
    values = 8 * TOKENS * WIDTH
    expected = 2.78 + 0.2  # a Gaussian in steps of 0.6, and scales
    assert 8 * found[5][0] / values < expected
    assert found[-1][0] < 0.7 * found[5][0]


@pytest.mark.usefixtures("small_costs")
@pytest.mark.parametrize("stop", mostly_slow([1, 17], lambda stop: stop == 17))
def test_changing_over_survives_a_restart(stop: int) -> None:
    whole, again = ends(), ends()
    before = follow(*whole, range(stop), until=6)
    for old, new in zip(whole, again, strict=True):
        new.load_state_dict(old.state_dict())
    rest = [follow(*pair, range(stop, 24), until=6) for pair in (whole, again)]
    assert rest[0] == rest[1]
    assert [*before, *rest[0]] == follow(*ends(), range(24), until=6)


def test_what_is_sent_is_measured() -> None:
    sender, receiver = ends()
    generator, ids = torch.Generator().manual_seed(0), list(range(8))
    base_BTD = torch.randn(8, TOKENS, WIDTH, generator=generator)
    for step in range(7):
        change_BTD = torch.zeros(8, TOKENS, WIDTH)
        change_BTD[..., :4] = torch.randn(8, TOKENS, 4, generator=generator)
        visit(sender, receiver, base_BTD + 3 * change_BTD, ids, step)
        found = error_stats(sender.error_meter.take())
    assert found.cosine is not None
    assert found.cosine == pytest.approx(32 / (32 + 36), abs=0.15)
    assert found.dimensions is not None
    assert 4 <= found.dimensions <= 6
    assert found.gain is not None
    assert found.gain > 0.5
    assert error_stats(receiver.error_meter.take()).gain is None


def test_bases_are_dropped_when_nobody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basis_search, "_ENTRY_BITS", -1e9)  # none is ever good enough
    sender, receiver = ends()
    source = Source(16)
    for step in range(34):
        half = list(range(8)) if step < 17 else list(range(8, 16))
        visit(sender, receiver, source.visit(half), half, step)
        held = set(sender.learned.bases)
        assert held == set(receiver.learned.bases)
        assert len(held) <= 4  # the channels, that of others' samples, one before, the newest
    assert sender.learned.version >= 5
    out_BTD, _ = send(sender, receiver, source.visit([0, 9]), [0, 9], 34)
    assert bool(out_BTD.isfinite().all())


def test_a_slow_search_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = train(*ends(), range(12))
    search = basis_search.BasisSearch.end_step

    def slow_search(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return search(*arguments, **options)

    monkeypatch.setattr(basis_search.BasisSearch, "end_step", slow_search)
    assert train(*ends(), range(12)) == quick


@pytest.mark.slow
def test_a_process_that_ends_during_a_search_ends_well() -> None:
    """An interpreter that goes while a thread is inside torch aborts."""
    program = """
import threading, torch
from thinpipe.aqsgd.transform import basis_search
from thinpipe.aqsgd.transform.config import TransformConfig, build_transform

inside, search = threading.Event(), basis_search.BasisSearch.end_step
def end_step(*arguments, **options):
    inside.set()
    return search(*arguments, **options)

basis_search.BasisSearch.end_step = end_step
end, ids_B = build_transform(TransformConfig(), width=720), torch.arange(4)
for step in range(4):
    x_BTD = torch.logspace(0, -3, 720) * torch.randn(4, 64, 720)
    plan = end.plan(ids_B, x_BTD.shape, step=step)
    end.encode(plan, x_BTD, torch.empty(plan.capacity, dtype=torch.uint8))
    inside.clear()
    end.finish_step(keep=True)
assert inside.wait(60)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
