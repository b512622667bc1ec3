"""What replicas exchange is counted on messages that are really sent."""

import pytest
import torch

from thinpipe.launch.memory.exchange import held_nbytes, measure_exchange


def test_a_ring_sends_two_copies_less_a_share() -> None:
    cost = measure_exchange("allreduce", {}, 3)
    assert cost.nbytes == pytest.approx(4 * 2 * 2 / 3, rel=1e-3)  # headers come on top
    assert cost.state_nbytes == 0
    assert not cost.overlaps


def test_an_exchange_every_thirty_steps_is_averaged_over_them() -> None:
    once, rare = (measure_exchange("diloco", {"interval": n}, 3) for n in (1, 30))
    assert once.nbytes == pytest.approx(30 * rare.nbytes)
    assert rare.state_nbytes == 8  # a global copy and the outer momentum


def test_a_warm_up_is_not_counted() -> None:
    later = measure_exchange("cocktail", {"warmup_steps": 5}, 3)
    assert later.nbytes < 0.1


def test_tensors_are_counted_wherever_they_are() -> None:
    held = {"a": [torch.zeros(3), {"b": torch.zeros(2, dtype=torch.int8)}], "c": 5, "d": None}
    assert held_nbytes(held) == 14
