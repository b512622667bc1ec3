"""Exchanges under way: in order, once, and kept by a checkpoint."""

import threading

import pytest
import torch

from thinpipe.gradcomp.overlap import Overlap

CPU = torch.device("cpu")


def fail() -> None:
    raise RuntimeError("cut")


def test_jobs_run_in_parallel_and_are_joined_in_their_order() -> None:
    overlap, go = Overlap(CPU), threading.Event()
    overlap.launch(lambda: (go.wait(9), torch.ones(2)))
    overlap.launch(lambda: 7)
    go.set()
    ((waited, ones),) = overlap.join(1)
    assert waited
    assert torch.equal(ones, torch.ones(2))
    assert overlap.join() == [7]
    assert overlap.join() == []


def test_what_was_found_survives_a_restart_and_saving_takes_nothing() -> None:
    overlap, other = Overlap(CPU), Overlap(CPU)
    overlap.launch(lambda: (1, [torch.arange(3)], None))
    saved = overlap.save()
    other.restore(saved)
    for each in (overlap, other):
        ((number, (values,), nothing),) = each.join()
        assert (number, values.tolist(), nothing) == (1, [0, 1, 2], None)


@pytest.mark.parametrize("call", ["join", "wait", "save"])
def test_a_failure_is_raised_by_all_that_wait(call: str) -> None:
    overlap = Overlap(CPU)
    overlap.launch(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cut"):
            getattr(overlap, call)()


@pytest.mark.parametrize("state", [{}, {"owed": True}, {"under_way": None}])
def test_a_state_of_an_earlier_version_is_rejected(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="in the form of an earlier version"):
        Overlap(CPU).restore(state)
