"""Laws of messages with the largest values of every tile."""

from typing import Literal

import pytest
import torch

from tests.pipeline.wire.codecs import through
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.tile_topk import TILE, TileTopK

SIZES = (1, 100, TILE, TILE + 1)


def values(numel: int) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("kept", [2, TILE])
@pytest.mark.parametrize("numel", SIZES)
def test_seen_is_what_the_peer_decodes(numel: int, kept: int, bits: Literal[1, 2]) -> None:
    codec, x = TileTopK(kept, bits), values(numel)
    wire = torch.zeros(2, codec.capacity(numel), dtype=torch.uint8)
    seen, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    assert codec.encode(x, wire, seen, noise=None) == wire.shape[1]
    codec.decode(wire, out)
    assert torch.equal(seen, out)
    total, count = torch.zeros(numel), torch.zeros(numel)
    for row in wire:
        codec.add_to(row, total, count)
    torch.testing.assert_close(total, out.sum(0))
    if bits == 1:
        assert torch.equal(count, out.abs().sum(0))


@pytest.mark.parametrize("bits", [1, 2])
def test_the_largest_of_each_tile_are_kept(bits: Literal[1, 2]) -> None:
    x = values(2 * TILE)[:1]
    seen, _ = through(TileTopK(64, bits), x)
    for tile, found in zip(x.view(2, TILE), seen.view(2, TILE), strict=True):
        places = found.nonzero().flatten()
        assert torch.equal(places, tile.abs().topk(64).indices.sort().values)
        if bits == 1:
            assert torch.equal(found[places], tile[places].sign())


def test_two_bits_keep_the_mean_of_what_was_chosen() -> None:
    x = values(TILE)[:1] + 0.3
    seen, _ = through(TileTopK(256, 2), x)
    chosen = seen != 0
    assert seen[chosen].mean() == pytest.approx(float(x[chosen].mean()), rel=1e-5)
    assert len(seen[chosen].unique()) == 4


def test_bytes_are_twelve_bits_an_index_and_the_codes() -> None:
    """DeMo with 32 of 4,096: 52 bytes a tile; SparseLoCo with 64 and 2 bits: 112, and a head."""
    assert TileTopK(32, 1).capacity(10 * TILE) == 10 * 52
    assert TileTopK(64, 2).capacity(10 * TILE) == 10 * 112 + 20


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(wrong: float) -> None:
    x = values(TILE)[:1]
    x[0, 5] = wrong
    assert through(TileTopK(4, 2), x)[0].isnan().any()
    with pytest.raises(ValueError, match="not finite"):
        through(TileTopK(4, 1), x)


@pytest.mark.parametrize("bits", [1, 2])
def test_a_row_that_is_too_short_is_an_error(bits: Literal[1, 2]) -> None:
    codec = TileTopK(64, bits)
    wire = torch.zeros(codec.capacity(TILE) - 1, dtype=torch.uint8)
    for use in (codec.add_to, lambda row, out, _: codec.decode(row[None], out[None])):
        with pytest.raises(CodingError, match="are needed"):
            use(wire, torch.zeros(TILE), torch.zeros(TILE))
