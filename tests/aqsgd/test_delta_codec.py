"""Coding a change in tiles."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.delta import DeltaBoundary
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.uniform import PackedMemory

WIDTH = 16
SHAPE = (6, WIDTH)


def rows(count: int, numel: int, seed: int) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))


def exchange(
    ends: list[DeltaBoundary], x: torch.Tensor, ids: list[int], *, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the receiver gets, and the message."""
    ids_B = torch.tensor(ids)
    plans = [end.plan(ids_B, x.shape, step=0) for end in ends]
    assert plans[0].capacity == plans[1].capacity
    wire, out = (
        torch.full((plans[0].capacity,), 0xAA, dtype=torch.uint8),
        torch.full_like(x, torch.nan),
    )
    ends[0].encode(plans[0], x, wire)
    ends[1].decode(plans[1], wire, out)
    for end in ends:
        end.finish_step(keep=keep)
    return out, wire


def make_ends(spec: AqsgdConfig) -> list[DeltaBoundary]:
    return [build_delta(spec, width=WIDTH, key=3) for _ in range(2)]


@given(
    seed=st.integers(0, 10**6),
    jumps=st.lists(st.booleans(), min_size=3, max_size=8),
    memory=st.sampled_from(["fp32", "bf16", 8]),
    delta=st.sampled_from(["uniform", "tiles"]),
    bits=st.integers(2, 6),
)
@settings(max_examples=40)
def test_memories_stay_equal_whatever_is_sent(
    seed: int, jumps: list[bool], memory: Any, delta: Any, bits: int
) -> None:
    ends = make_ends(AqsgdConfig(bits=bits, memory=memory, delta=delta))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, *SHAPE, generator=generator)
    for jump in jumps:
        ids = torch.randperm(5, generator=generator)[:3].tolist()
        if jump:  # samples whose activation has nothing in common with the last one
            x[ids[:2]] = torch.randn(2, *SHAPE, generator=generator)
        if seed % 7 == 0:
            x[ids[0], 0, 0] = torch.nan
        exchange(ends, x[ids], ids, keep=seed % 3 > 0)
        x = x + 0.05 * torch.randn(5, *SHAPE, generator=generator)
        assert ends[0].memory.digest() == ends[1].memory.digest()


def test_tiles_code_a_change_with_a_smaller_error() -> None:
    x, memory = rows(2, 4096, 1), rows(2, 4096, 2)
    x[:, 5::64] += 9.0
    found = {}
    for name in ("uniform", "tiles"):
        codec = AqsgdConfig(bits=2, delta=name).change_codec(64)
        wire = torch.empty(2, codec.capacity(4096), dtype=torch.uint8)
        stored = memory.view(torch.uint8)  # an fp32 memory's bytes
        ends = [PackedMemory(Cast("fp32"), stored, torch.full_like(stored, 255)) for _ in range(2)]
        out = torch.full_like(x, torch.nan)
        finite = codec.encode_change_packed(x, ends[0], wire, noise=None)
        assert torch.equal(finite, codec.decode_change_packed(wire, ends[1], out))
        assert torch.equal(ends[0].fresh_BW, ends[1].fresh_BW)
        assert torch.equal(ends[0].fresh_BW.view(torch.float32), out)
        found[name] = float((out - x).norm() / (x - memory).norm())
    assert found["tiles"] < 0.9 * found["uniform"]


@pytest.mark.parametrize("key", ["scale_per", "rounding", "rate"])
def test_settings_that_tiles_do_not_have_are_refused(key: str) -> None:
    value = {"scale_per": 64, "rounding": "stochastic", "rate": 1.0}[key]
    with pytest.raises(ValueError, match=f'{key}: has no meaning with delta = "tiles"'):
        AqsgdConfig.model_validate({"delta": "tiles", "coding": "zstd", key: value})
    with pytest.raises(ValueError, match="bits = 8: use 2 to 7"):
        AqsgdConfig(delta="tiles", bits=8)
