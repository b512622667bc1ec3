"""Sparse masks as gaps: exact, close to the entropy, and no mask can be made of damaged bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.pipeline.wire.coding import gaps
from thinpipe.pipeline.wire.coding.entropy import CodingError


def mask_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def random_mask(nbytes: int, share: float) -> torch.Tensor:
    return mask_of(np.random.default_rng(0).random(8 * nbytes) < share)


def marks(mask_M: torch.Tensor) -> int:
    return int(np.bitwise_count(mask_M.numpy()).sum())


def coded(mask_M: torch.Tensor) -> torch.Tensor | None:
    wire = torch.full_like(mask_M, 0xAA)
    length = gaps.encode(mask_M, wire)
    return None if length is None else wire[:length]


@given(st.lists(st.integers(0, 8 * 2000 - 1), min_size=1, max_size=300, unique=True))
def test_masks_come_back(places: list[int]) -> None:
    mask_M = mask_of(np.isin(np.arange(8 * 2000), places))
    wire, back_M = coded(mask_M), torch.full_like(mask_M, 0xAA)
    assert wire is not None
    gaps.decode(wire, len(places), back_M)
    assert torch.equal(back_M, mask_M)


@pytest.mark.parametrize("share", [0.0005, 0.005, 0.015, 0.05])
def test_random_masks_take_little_more_than_their_entropy(share: float) -> None:
    mask_M = random_mask(1 << 18, share)
    wire = coded(mask_M)
    assert wire is not None
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert wire.numel() < 1.02 * entropy * mask_M.numel() + 110  # table and block


def test_rows_of_a_table_take_less() -> None:
    bits = np.zeros((1000, 320), np.uint8)
    bits[::50] = np.random.default_rng(0).random((20, 320)) < 0.5
    mask_M = mask_of(bits)
    wire, scattered = coded(mask_M), coded(random_mask(mask_M.numel(), 0.01))
    assert wire is not None
    assert scattered is not None
    assert wire.numel() < 0.7 * scattered.numel()


def test_dense_and_empty_masks_are_left_as_they_are() -> None:
    assert coded(random_mask(1000, 0.5)) is None
    assert coded(torch.zeros(1000, dtype=torch.uint8)) is None


def test_damaged_bytes_are_an_error_or_another_mask_of_as_many() -> None:
    mask_M = random_mask(4000, 0.01)
    wire, marked = coded(mask_M), marks(mask_M)
    assert wire is not None
    back_M, rejected = torch.empty_like(mask_M), 0
    for place in range(0, 8 * wire.numel(), 3):
        damaged = wire.clone()
        damaged[place // 8] ^= 1 << place % 8
        try:
            gaps.decode(damaged, marked, back_M)
            assert marks(back_M) == marked
        except CodingError:
            rejected += 1
    assert rejected > 4 * wire.numel() / 3
    for length in range(0, wire.numel(), 3):
        with pytest.raises(CodingError):
            gaps.decode(wire[:length], marked, back_M)
