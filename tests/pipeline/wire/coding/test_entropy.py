"""Coded payloads come back whole, shorter, or not coded at all."""

import pytest
import torch
import zstandard

from thinpipe.pipeline.wire.coding import entropy
from thinpipe.pipeline.wire.coding.entropy import Coder, CodingError, compress, expand


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
def test_another_size_is_refused(expected: int) -> None:
    payload, coded = likely(5000), torch.empty(5000, dtype=torch.uint8)
    length = compress(payload, coded)
    with pytest.raises(CodingError, match=r"5000 bytes|a coded payload"):
        expand(coded[:length], torch.empty(expected, dtype=torch.uint8))


def test_damaged_bytes_are_refused() -> None:
    coded = torch.empty(5000, dtype=torch.uint8)
    length = compress(likely(5000), coded)
    coded[1] ^= 0xFF
    with pytest.raises(CodingError):
        expand(coded[:length], torch.empty(5000, dtype=torch.uint8))


def test_a_frame_that_says_how_long_it_is_is_refused() -> None:
    """The decoder would believe a petabyte."""
    data = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(5000))
    coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(CodingError, match="says how long"):
        expand(coded, torch.empty(5000, dtype=torch.uint8))


ZSTD = {1: compress}


@pytest.mark.parametrize(("link_rate", "pays"), [(0.0, True), (1e4, True), (1e15, False)])
def test_a_coder_works_while_the_link_is_slower(link_rate: float, pays: bool) -> None:
    coder, payload = Coder(link_rate), likely(100_000)
    coded = torch.empty_like(payload)
    lengths = [coder(payload, coded, ZSTD) for _ in range(1 + 64 + 1)]
    assert lengths[0] is not None  # the first one is how it learns
    assert all((length is not None) == pays for length in lengths[1:65])
    assert lengths[65] is not None  # what was left out is tried again


def test_a_payload_that_does_not_shrink_is_not_worth_coding() -> None:
    coder, payload = Coder(1e4), torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    coded, shrinking = torch.empty(100_000, dtype=torch.uint8), likely(100_000)
    assert coder(payload, coded, ZSTD) is None
    assert coder(shrinking, coded, ZSTD) is None
    assert [coder(shrinking, coded, ZSTD) is not None for _ in range(64)][-1]


@pytest.mark.parametrize(("link_rate", "best"), [(1e3, 2), (1e6, 1)])
def test_of_several_ways_the_quickest_in_all_is_taken(
    monkeypatch: pytest.MonkeyPatch, link_rate: float, best: int
) -> None:
    """The second way saves 200 bytes more but takes 10 ms."""
    now_s = 0.0
    monkeypatch.setattr(entropy.time, "perf_counter", lambda: now_s)

    def shorter(payload: torch.Tensor, coded: torch.Tensor) -> int:
        nonlocal now_s
        now_s += 0.01
        coded[:300] = 7
        return 300

    def quick(payload: torch.Tensor, coded: torch.Tensor) -> int:
        coded[:500] = 5
        return 500

    coder, payload = Coder(link_rate), torch.zeros(10_000, dtype=torch.uint8)
    coded = torch.empty_like(payload)
    expected = {1: (1, 500), 2: (2, 300)}[best]
    for _ in range(3):
        assert coder(payload, coded, {1: quick, 2: shorter}) == expected
        assert (coded[: expected[1]] == {1: 5, 2: 7}[best]).all()
    assert (coder(payload, coded, {1: quick}) is not None) == (best == 1)
