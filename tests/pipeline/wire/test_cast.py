"""Casts as codecs."""

import pytest
import torch

from thinpipe.pipeline.wire.cast import Cast, CastFormat
from thinpipe.pipeline.wire.coding.entropy import CodingError


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_seen_is_what_the_peer_decodes(name: CastFormat, dtype: torch.dtype) -> None:
    codec, x = Cast(name), torch.randn(3, 37).to(dtype)
    message = torch.zeros(5 + 3 * codec.capacity(37), dtype=torch.uint8)
    wire = message[5:].view(3, -1)  # starts at an odd byte
    seen, out = torch.empty_like(x), torch.empty_like(x)
    codec.encode(x, wire, seen, noise=None)
    codec.decode(wire, out)
    assert torch.equal(out, seen)
    assert torch.equal(out, x) == (name == "fp32" or dtype == torch.bfloat16)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_no_rows_and_no_values_are_fine(name: CastFormat, shape: tuple[int, int]) -> None:
    codec, x = Cast(name), torch.empty(shape)
    wire, out = torch.empty(shape[0], codec.capacity(shape[1]), dtype=torch.uint8), x.clone()
    codec.encode(x, wire, out, noise=None)
    codec.decode(wire, out)


def test_fp16_overflow_is_infinite_not_silent() -> None:
    codec, x = Cast("fp16"), torch.tensor([[1e5]])
    wire, out = torch.empty(1, 2, dtype=torch.uint8), torch.empty(1, 1)
    codec.encode(x, wire, noise=None)
    codec.decode(wire, out)
    assert torch.isinf(out).all()


@pytest.mark.parametrize("nbytes", [0, 1, 19, 21])
def test_a_row_of_another_length_is_an_error(nbytes: int) -> None:
    """One byte, above all, which a copy would repeat for all values."""
    out_BN = torch.zeros(1, 10)
    with pytest.raises(CodingError, match=f"{nbytes} bytes, where 20 are needed"):
        Cast("bf16").decode(torch.ones(1, nbytes, dtype=torch.uint8), out_BN)
    assert not out_BN.any()
