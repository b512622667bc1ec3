"""Exchanges under way: in order, and once."""

import threading

import pytest
import torch

from thinpipe.gradcomp.overlap import Overlap

CPU = torch.device("cpu")


def test_jobs_run_in_parallel_and_are_joined_in_their_order() -> None:
    overlap, go = Overlap(CPU), threading.Event()
    overlap.launch(lambda: (go.wait(9), torch.ones(2)))
    overlap.launch(lambda: 7)
    go.set()
    (waited, ones), seven = overlap.join()
    assert waited
    assert torch.equal(ones, torch.ones(2))
    assert seven == 7
    assert overlap.join() == []


@pytest.mark.parametrize("state", [{}, {"owed": True}, {"under_way": None}])
def test_a_state_of_an_earlier_version_is_rejected(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="in the form of an earlier version"):
        Overlap(CPU).restore(state)
