"""Coded payloads come back whole, shorter, or not coded at all."""

import pytest
import torch
import zstandard

from thinpipe.pipeline.wire.coding.entropy import CodingError, compress, expand


def likely(count: int) -> torch.Tensor:
    return (torch.randn(count) * 2).round().to(torch.uint8)


@pytest.mark.parametrize("count", [200, 5000, 300_000])
def test_what_was_coded_comes_back(count: int) -> None:
    payload, coded = likely(count), torch.empty(count, dtype=torch.uint8)
    length = compress(payload, coded)
    assert length is not None
    assert length < 0.7 * count
    out = torch.empty_like(payload)
    expand(coded[:length], out)
    assert torch.equal(out, payload)


@pytest.mark.parametrize("count", [0, 1, 10_000])
def test_what_cannot_be_shortened_is_left_alone(count: int) -> None:
    payload = torch.randint(0, 256, (count,), dtype=torch.uint8)
    coded = torch.full_like(payload, 7)
    assert compress(payload, coded) is None
    assert (coded == 7).all()


@pytest.mark.parametrize("expected", [4999, 5001])
def test_another_size_is_rejected(expected: int) -> None:
    payload, coded = likely(5000), torch.empty(5000, dtype=torch.uint8)
    length = compress(payload, coded)
    with pytest.raises(CodingError, match=r"5000 bytes|a coded payload"):
        expand(coded[:length], torch.empty(expected, dtype=torch.uint8))


def test_damaged_bytes_are_rejected() -> None:
    coded = torch.empty(5000, dtype=torch.uint8)
    length = compress(likely(5000), coded)
    coded[1] ^= 0xFF
    with pytest.raises(CodingError):
        expand(coded[:length], torch.empty(5000, dtype=torch.uint8))


def test_a_frame_that_says_how_long_it_is_is_rejected() -> None:
    """The decoder would believe a petabyte."""
    data = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(5000))
    coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(CodingError, match="says how long"):
        expand(coded, torch.empty(5000, dtype=torch.uint8))
