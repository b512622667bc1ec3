"""Buckets of parameters, and the moment when their gradients are final."""

import pytest
import torch
from torch import nn

from thinpipe.gradcomp.buckets import Bucket, Readiness, make_buckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def sizes(buckets: tuple[Bucket, ...]) -> list[list[int]]:
    return [[p.numel() for p in bucket.parameters] for bucket in buckets]


def test_buckets_keep_the_order_and_cut_no_parameter() -> None:
    found = make_buckets(parameters(10, 10, 50, 1, 1), nbytes=80)
    assert sizes(found) == [[10, 10], [50], [1, 1]]
    assert [bucket.index for bucket in found] == [0, 1, 2]
    assert found[0].numel == 20


def test_dtypes_and_frozen_parameters_are_kept_apart() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    mixed = [*parameters(4), frozen, *parameters(5, dtype=torch.bfloat16), *parameters(6)]
    assert sizes(make_buckets(mixed, nbytes=1000)) == [[4], [5], [6]]


class Watched:
    """Three buckets of one parameter each, and what was launched so far."""

    def __init__(self) -> None:
        self.weights = parameters(2, 2, 2)
        self.launched: list[int] = []
        self.readiness = Readiness(
            make_buckets(self.weights, nbytes=1), lambda b: self.launched.append(b.index)
        )

    def backward(self, *indices: int) -> list[int]:
        sum(self.weights[index].sum() for index in indices).backward()  # type: ignore[union-attr]
        return list(self.launched)


def test_a_bucket_goes_with_its_last_gradient_and_after_those_before_it() -> None:
    watched = Watched()
    watched.readiness.begin_step(2)
    assert watched.backward(0, 1, 2) == []
    assert watched.backward(1, 2) == []  # ready, but bucket 0 is not
    assert watched.backward(0) == [0, 1, 2]
    watched.readiness.finish()
    assert watched.launched == [0, 1, 2]


def test_what_never_became_ready_goes_at_the_end() -> None:
    watched = Watched()
    watched.readiness.begin_step(1)
    assert watched.backward(0, 2) == [0]
    watched.readiness.finish()
    assert watched.launched == [0, 1, 2]


def test_without_a_count_all_wait_for_the_end() -> None:
    watched = Watched()
    watched.readiness.begin_step(0)
    assert watched.backward(0, 1, 2) == []
    watched.readiness.finish()
    assert watched.launched == [0, 1, 2]


def test_a_gradient_after_the_exchange_is_an_error() -> None:
    watched = Watched()
    watched.readiness.begin_step(1)
    watched.backward(0)
    with pytest.raises(RuntimeError, match="more backward passes ran"):
        watched.backward(0)
