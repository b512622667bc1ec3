"""Exchanges by sites: what one hop between all ranks gives, with fewer bytes between sites."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from thinpipe.gradcomp.exchange import ExchangeKey, Frames
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.sharded.qsdp import value_codec
from thinpipe.gradcomp.sharded.segments import Segmented
from thinpipe.gradcomp.sharded.sites import Exchange, Sites, divided
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, TO_SERVER
from thinpipe.pipeline.wire.header import DesyncError

SHARDS, SIZES = 6, [50, 9, 31]
EXACT = Segmented(SIZES, [Cast("fp32")] * 3)
QUANTIZED = Segmented(SIZES, [value_codec(3, "stochastic", 32), Cast("fp32"), Cast("bf16")])


def vectors(rank: int, numel: int = sum(SIZES)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(SHARDS, numel, generator=generator))


def done(exchange: Exchange) -> Any:
    return exchange.decode(exchange.exchange(exchange.encode()))


def run(kind: str, codec: Segmented, ranks: int) -> tuple[list[Tensor], list[int]]:
    """What each rank has in the end, and how many bytes it sent to other sites."""
    sites = [Sites(peers, ranks) for peers in local_peers(SHARDS)]

    def one(rank: int) -> Tensor:
        own, numel = replace(codec, noise=Noise(rank, 0, torch.tensor([0]))), sum(codec.sizes)
        if kind == "scatter":
            return done(sites[rank].scatter(ExchangeKey(3, 1), own, vectors(rank, numel)))
        parts = [torch.full((numel,), torch.nan) for _ in range(SHARDS)]
        parts[rank].copy_(vectors(rank, numel)[0])
        done(sites[rank].gather(ExchangeKey(3, 1), own, parts))
        return torch.stack(parts)

    with ThreadPoolExecutor(SHARDS) as pool:
        found = list(pool.map(one, range(SHARDS)))
    return found, [site.bytes_sent for site in sites]


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_all_gather_what_one_hop_gathers_bit_for_bit(ranks: int) -> None:
    flat, _ = run("gather", QUANTIZED, 1)
    found, _ = run("gather", QUANTIZED, ranks)
    for parts in found:
        assert torch.equal(parts, flat[0])
    for rank in range(SHARDS):
        error = (flat[0][rank] - vectors(rank)[0]).abs()
        assert float(error[50:59].max()) == 0
        assert 0 < float(error[:50].max()) < 1


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_coded_messages_are_shorter_and_mean_the_same(kind: str, ranks: int) -> None:
    rare = Segmented([9000], [value_codec(8, "nearest", 9000)])
    coded = Segmented(rare.sizes, rare.codecs, coded=True)
    plain, nbytes = run(kind, rare, ranks)
    found, fewer = run(kind, coded, ranks)
    assert all(map(torch.equal, found, plain))
    assert all(0.5 * most < less < 0.97 * most for less, most in zip(fewer, nbytes, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_sums_are_those_of_all_ranks_and_are_rounded_between_sites_alone(ranks: int) -> None:
    exact = torch.stack([torch.stack(vectors(rank)) for rank in range(SHARDS)]).sum(0)
    for found, expected in zip(run("scatter", EXACT, ranks)[0], exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    errors = [
        float((found - expected)[:50].abs().max())
        for found, expected in zip(run("scatter", QUANTIZED, ranks)[0], exact, strict=True)
    ]
    assert max(errors) < (1e-5 if ranks == SHARDS else 8)
    assert ranks == SHARDS or min(errors) > 0.1


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_every_value_goes_to_each_other_site_once(kind: str, ranks: int) -> None:
    message = EXCHANGE_HEADER_NBYTES + QUANTIZED.capacity(sum(SIZES))
    assert run(kind, QUANTIZED, ranks)[1] == SHARDS * [(SHARDS // ranks - 1) * message]


FRAMES = Frames(ExchangeKey(1, 0), Cast("fp32"))
MESSAGES = [FRAMES.pack(torch.full((n,), float(n)), None, TO_SERVER, n) for n in (3, 5)]
BUNDLE = torch.cat(MESSAGES)


@pytest.mark.parametrize("cut", [0, 3, 47, len(MESSAGES[0]), len(MESSAGES[0]) + 20])
def test_a_bundle_that_was_cut_is_rejected(cut: int) -> None:
    with pytest.raises(DesyncError, match="rank 1 of this site forwarded"):
        divided(BUNDLE[:cut], 2, 1)


def test_more_than_was_agreed_is_rejected() -> None:
    with pytest.raises(DesyncError, match="20 bytes more, not 2 messages"):
        divided(torch.cat([BUNDLE, torch.zeros(20, dtype=torch.uint8)]), 2, 1)
