"""Laws of messages with a sign per value and a mean magnitude per group."""

import math

import pytest
import torch
from torch import Tensor

from tests.pipeline.wire.backends import using
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.kernels import Backend
from thinpipe.pipeline.wire.sign_mean import SignMean

SIZES = (1, 8, 9, 128, 129, 10_003)


def values(numel: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, numel, generator=torch.Generator().manual_seed(numel))


def coded(codec: SignMean, x: Tensor) -> tuple[Tensor, Tensor]:
    wire = torch.full((len(x), codec.capacity(x.shape[1])), 255, dtype=torch.uint8)
    seen, out = torch.empty_like(x), torch.empty_like(x)
    assert codec.encode(x, wire, seen) == wire.shape[1]
    codec.decode(wire, out)
    assert torch.equal(seen.nan_to_num(7), out.nan_to_num(7))
    return wire, out


@pytest.mark.parametrize("group", [8, 128])
@pytest.mark.parametrize("numel", SIZES)
def test_backends_make_the_same_bytes_and_values(numel: int, group: int) -> None:
    x = values(numel)
    x[:, ::5] = 0
    x[:, ::7] = -0.0
    compiled = coded(SignMean(group), x)
    with using("reference"):
        reference = coded(SignMean(group), x)
    assert torch.equal(reference[0], compiled[0])
    assert torch.equal(reference[1], compiled[1])


@pytest.mark.parametrize("numel", SIZES)
def test_every_value_becomes_the_mean_magnitude_of_its_group(numel: int) -> None:
    x = values(numel, 1)
    _, out = coded(SignMean(128), x)
    for part, found in zip(x[0].split(128), out[0].split(128), strict=True):
        assert torch.equal(found.signbit(), part.signbit())
        assert len(found.abs().unique()) == 1
        assert found.abs()[0] == pytest.approx(float(part.abs().mean()), rel=2**-8)


def test_the_error_is_that_of_a_normal_distribution() -> None:
    """1 - 2 / pi, and bf16 scales add nothing to speak of."""
    x = values(1_000_000, 1)
    _, out = coded(SignMean(128), x)
    assert float((x - out).square().mean()) == pytest.approx(1 - 2 / math.pi, rel=0.01)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_what_is_added_is_what_is_decoded(backend: Backend) -> None:
    codec, x = SignMean(), values(1001, 1)
    wire, out = coded(codec, x)
    total = values(1002, 1)[0, :1001].clone()
    expected = total + out[0]
    with using(backend):
        codec.decode_add(wire[0], total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf, 3e38])
def test_a_group_that_is_not_finite_decodes_to_nan(backend: Backend, fault: float) -> None:
    x = values(300, 1)
    x[0, 130:140] = fault
    with using(backend):
        _, out = coded(SignMean(), x)
    assert out[0, 128:256].isnan().all()
    assert out[0, :128].isfinite().all()
    assert out[0, 256:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_formats_are_read_and_written(dtype: torch.dtype) -> None:
    codec, x = SignMean(), values(200).to(dtype)
    wire = torch.empty(2, codec.capacity(200), dtype=torch.uint8)
    codec.encode(x, wire)
    _, expected = coded(codec, x.float())
    out = torch.empty_like(x)
    codec.decode(wire, out)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("missing", [1, 100, 140, 141])
def test_a_row_that_is_cut_short_is_an_error(missing: int) -> None:
    codec, x = SignMean(), values(1000, 1)
    wire, _ = coded(codec, x)
    assert wire.numel() == 141
    short, out = wire[:, : 141 - missing], torch.zeros(1, 1000)
    with pytest.raises(CodingError, match=f"{141 - missing} bytes, where 141"):
        codec.decode(short, out)
    with pytest.raises(CodingError):
        codec.decode_add(short[0], out[0])
    assert not out.any()


@pytest.mark.parametrize("group", [0, 4, 100])
def test_groups_are_whole_bytes(group: int) -> None:
    with pytest.raises(ValueError, match=f"group = {group}"):
        SignMean(group)
