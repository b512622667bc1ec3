"""Coding a change in tiles."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.aqsgd.coded_memory import CodedMemory
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.delta import DeltaBoundary
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.uniform import Uniform

WIDTH = 16
SHAPE = (6, WIDTH)


def rows(count: int, numel: int, seed: int) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))


def exchange(
    ends: list[DeltaBoundary], x: torch.Tensor, ids: list[int], *, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
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
@settings(max_examples=20)
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
        sent, received, out = (torch.full_like(x, torch.nan) for _ in range(3))
        finite = codec.encode_change(x, Cached(memory, sent), wire, noise=None)
        assert torch.equal(finite, codec.decode_change(wire, Cached(memory, received), out))
        assert torch.equal(sent, received)
        assert torch.equal(sent, out)
        found[name] = float((out - x).norm() / (x - memory).norm())
    assert found["tiles"] < 0.9 * found["uniform"]


@pytest.mark.parametrize(("key", "value"), [("scale_per", 64), ("rounding", "stochastic")])
def test_settings_that_tiles_do_not_have_are_rejected(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'{key}: has no meaning with delta = "tiles"'):
        AqsgdConfig.model_validate({"delta": "tiles", key: value})
    with pytest.raises(ValueError, match="bits = 8: use 2 to 7"):
        AqsgdConfig(delta="tiles", bits=8)


@pytest.mark.parametrize(
    "memory",
    [Uniform(8, 24), Uniform(4, 24 * 70), Uniform(8, 40), Cast("bf16")],
)
def test_a_stored_memory_changes_as_if_it_were_decoded(memory: Uniform | Cast) -> None:
    delta, numel = Uniform(3, 64), 24 * 70
    values, x = rows(1, numel, 0), rows(1, numel, 0) + 0.1 * rows(1, numel, 1)
    kept, wire = CodedMemory(memory), torch.empty(1, delta.capacity(numel), dtype=torch.uint8)
    kept.stage(torch.tensor([3]), values, wire)
    kept.commit()
    visit = kept.open(3, numel, torch.device("cpu"))
    assert delta.encode_change(x, visit.cached, wire, noise=None).all()
    kept.close(visit, wire[0], keep=True)
    kept.commit()
    row = torch.empty(1, memory.capacity(numel), dtype=torch.uint8)
    memory.encode(values, row, values, noise=None)
    expected, fresh = torch.empty_like(wire), torch.empty_like(x)
    delta.encode_change(x, Cached(values, fresh), expected, noise=None)
    memory.encode(fresh, row, fresh, noise=None)
    assert torch.equal(wire, expected)
    assert torch.equal(kept.read(torch.tensor([3]), numel), fresh)
