"""Sealed bytes: what was sealed is found again, anything else is not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.pipeline.wire.checksum import CHECKSUM_NBYTES, opened, sealed


@given(st.binary(max_size=64), st.integers(0, 2**32))
def test_what_was_sealed_is_opened(data: bytes, number: int) -> None:
    values = torch.tensor(list(data), dtype=torch.uint8)
    message = sealed(values, number)
    assert len(message) == len(data) + CHECKSUM_NBYTES
    found = opened(message, number)
    assert found is not None
    assert torch.equal(found, values)
    assert opened(message, number + 1) is None


@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_flipped_bit_is_noticed(data: bytes, dice: st.DataObject) -> None:
    message = sealed(torch.tensor(list(data), dtype=torch.uint8), 3)
    place = dice.draw(st.integers(0, len(message) - 1))
    message[place] ^= 1 << dice.draw(st.integers(0, 7))
    assert opened(message, 3) is None
