"""Coding a change in tiles, or the value itself where the change is no smaller."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training import config
from thinpipe.aqsgd.config import AqsgdConfig, AutoConfig, build_delta
from thinpipe.aqsgd.delta import DeltaBoundary
from thinpipe.aqsgd.delta_codec import Composed, Switching
from thinpipe.launch.components import build_boundary
from thinpipe.pipeline.comm.boundary import Stateless
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.hadamard import Hadamard
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
def test_memories_stay_equal_whatever_the_sender_chooses(
    seed: int, jumps: list[bool], memory: Any, delta: Any, bits: int
) -> None:
    ends = make_ends(AutoConfig(bits=bits, memory=memory, delta=delta))
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


def test_a_change_that_is_no_smaller_is_not_sent() -> None:
    """The slot's first byte tells: 0 the change, 1 the value; both messages are equally long."""
    ends = make_ends(AutoConfig(bits=4))
    x = rows(1, 96, 0).view(1, *SHAPE)
    exchange(ends, x, [7])
    near, sent_near = exchange(ends, 1.1 * x, [7])
    far, sent_far = exchange(ends, -x, [7])
    assert (sent_near[0], sent_far[0]) == (0, 1)
    assert sent_near.numel() == sent_far.numel()
    alone = torch.empty_like(x.flatten(1))
    codec = Hadamard(4)
    wire = torch.empty(1, codec.capacity(96), dtype=torch.uint8)
    codec.encode(-x.flatten(1), wire, alone)
    assert torch.equal(far.flatten(1), alone)
    assert (near - 1.1 * x).norm() < 0.02 * x.norm()


def test_without_history_the_error_is_that_of_stateless_tiles() -> None:
    """Under random dropout a delta would be larger than the activation: auto never is worse."""
    ends, plain = make_ends(AutoConfig(bits=4)), make_ends(AqsgdConfig(bits=4))
    errors: dict[str, list[float]] = {"auto": [], "aqsgd": []}
    for visit in range(5):
        x = rows(3, 96, visit).view(3, *SHAPE)
        for name, pair in (("auto", ends), ("aqsgd", plain)):
            out, _ = exchange(pair, x, [0, 1, 2])
            errors[name].append(float((out - x).norm() / x.norm()))
    assert max(errors["auto"][1:]) < 0.12
    assert max(errors["auto"][1:]) < min(errors["aqsgd"][1:])


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


def test_sizes_are_exact() -> None:
    codec = Switching(Composed(Hadamard(3)), Hadamard(5))
    assert codec.capacity(640) == 1 + Hadamard(5).capacity(640)
    spec = AutoConfig(bits=3)
    end = build_delta(spec, width=WIDTH, key=0)
    first = Hadamard(5).capacity(96)
    assert end.plan(torch.tensor([1, 2]), torch.Size((2, *SHAPE)), step=0).capacity == 2 * first


def test_data_that_is_seen_once_is_not_remembered() -> None:
    auto = {"forward": {"kind": "auto", "bits": 3}, "backward": {"kind": "raw"}}
    once = config(boundary=[auto], train={"epochs": 1}).boundary_at(2).forward
    assert isinstance(build_boundary(once, width=WIDTH, key=0)["train"], Stateless)
    assert once.kind == "stateless"
    twice = config(boundary=[auto], train={"epochs": 2}).boundary_at(2).forward
    assert isinstance(build_boundary(twice, width=WIDTH, key=0)["train"], DeltaBoundary)


@pytest.mark.parametrize("key", ["scale_per", "rounding", "scale_dtype", "rate"])
def test_settings_that_tiles_do_not_have_are_refused(key: str) -> None:
    value = {"scale_per": 64, "rounding": "stochastic", "scale_dtype": "fp32", "rate": 1.0}[key]
    with pytest.raises(ValueError, match=f'{key}: has no meaning with delta = "tiles"'):
        AqsgdConfig.model_validate({"delta": "tiles", "coding": "zstd", key: value})
    with pytest.raises(ValueError, match="bits = 8: use 2 to 7"):
        AqsgdConfig(delta="tiles", bits=8)
