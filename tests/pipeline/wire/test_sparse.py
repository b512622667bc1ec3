"""Laws of sparse messages."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.wire.codecs import using, values
from thinpipe.pipeline.wire import sparse
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.sparse import SparseCodec

SIZES = (0, 1, 2, 9, 127, 128, 5003)
BITS = (1, 2, 4, 7, 8, 16, 32)


def message(codec: SparseCodec, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The message's bytes, and what the sender expects them to decode to."""
    room = torch.full((codec.capacity(x.numel()) + 9,), 0xAA, dtype=torch.uint8)
    seen = torch.full(x.shape, torch.nan, device=x.device)
    length = codec.encode(x, room[:-9], seen)
    assert length <= codec.capacity(x.numel())
    assert (room[-9:] == 0xAA).all()
    return room[:length].clone(), seen


def decoded(codec: SparseCodec, wire: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.full((numel,), torch.nan)
    codec.decode(wire, out)
    return out


@pytest.mark.parametrize("bits", BITS)
def test_seen_is_what_the_peer_decodes(bits: int) -> None:
    for numel in SIZES:
        for fraction in (0.01, 0.2, 1.0):
            codec = SparseCodec(fraction, bits)
            wire, seen = message(codec, values(numel))
            assert torch.equal(decoded(codec, wire, numel), seen)
            total = torch.ones(numel)
            codec.decode_add(wire, total)
            assert torch.equal(total, 1.0 + seen)
    wire, seen = message(SparseCodec(0.2, bits), torch.zeros(1000))
    assert not seen.any()
    assert torch.equal(decoded(SparseCodec(0.2, bits), wire, 1000), seen)


@given(
    numel=st.integers(0, 1500),
    fraction=st.floats(0.001, 1.0),
    bits=st.sampled_from(BITS),
    group=st.integers(1, 300),
    distinct=st.integers(1, 50),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_backends_write_equal_bytes_of_any_input(
    numel: int, fraction: float, bits: int, group: int, distinct: int, seed: int
) -> None:
    x = (values(numel, seed) * distinct).round() / 8  # with many ties
    codec = SparseCodec(fraction, bits, group)
    ours, seen = message(codec, x)
    with using("reference"):
        theirs, seen_there = message(codec, x)
    assert torch.equal(ours, theirs)
    assert torch.equal(seen, seen_there)


@pytest.mark.parametrize("numel", [200, 203])
def test_the_kept_values_are_torchs_top_k(numel: int) -> None:
    x, codec = values(numel), SparseCodec(0.2, 32)
    _, seen = message(codec, x)
    kept = codec.kept(numel)
    assert kept == round(0.2 * numel)
    expected = torch.zeros(numel).scatter_(0, (top := x.abs().topk(kept).indices), x[top])
    assert torch.equal(seen, expected)


def test_of_equal_magnitudes_the_first_are_kept_and_no_more() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0, 2.0, 0.0, 2.0, 2.0, 1.0])
    _, seen = message(SparseCodec(0.3, 32), x)
    assert seen.tolist() == [0.0, -2.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_32_bits_of_all_values_are_lossless(dtype: torch.dtype) -> None:
    x, codec = values(1001).to(dtype), SparseCodec(1.0, 32)
    wire, seen = message(codec, x)
    assert torch.equal(seen, x.float())
    out = torch.full_like(x, torch.nan)
    codec.decode(wire, out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("bits", range(3, 9))
def test_kept_values_are_within_half_a_step(bits: int) -> None:
    x, codec = values(4000), SparseCodec(0.25, bits, group=100)
    _, seen = message(codec, x)
    kept = seen != 0  # no kept value is near zero here
    assert int(kept.sum()) == 1000
    largest = x[kept].abs().view(10, 100).amax(1, keepdim=True)
    step = largest / (2 ** (bits - 1) - 0.5) * 1.01  # the scale is rounded up to bf16
    assert ((x - seen)[kept].abs().view(10, 100) <= step / 2).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fraction", [0.0001, 0.2, 1.0])
def test_what_is_not_finite_reaches_the_peer(bad: float, fraction: float) -> None:
    x = values(1000)
    x[617] = bad
    for bits in BITS:
        codec = SparseCodec(fraction, bits)
        wire, _ = message(codec, x)
        assert not torch.isfinite(decoded(codec, wire, 1000)[617])


@pytest.mark.parametrize(("bits", "limit"), [(4, 1.40), (2, 1.16)])
def test_a_random_fifth_in_4_bits_takes_its_entropy(bits: int, limit: float) -> None:
    """Mask 0.722 bits a candidate, scales 0.025, and less than `bits` for each kept value.

    At p = 0.1 a parameter costs a tenth of this; 1.6 is 200 times less than fp32.
    """
    numel = 200_000
    wire, _ = message(SparseCodec(0.2, bits), values(numel))
    assert wire.numel() * 8 / numel < limit
    capacity = SparseCodec(0.2, bits).capacity(numel)
    assert capacity == 8 + numel // 8 + 2 * 313 + bits * 5000


def uncoded(codec: SparseCodec, x: torch.Tensor) -> torch.Tensor:
    """A message whose parts coding does not shorten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "compress", lambda part, wire: None)
        return message(codec, x)[0]


def test_what_coding_does_not_shorten_goes_as_it_is() -> None:
    codec, x = SparseCodec(0.2, 4), values(3001)
    wire = uncoded(codec, x)
    assert len(wire) == codec.capacity(3001)
    assert torch.equal(decoded(codec, wire, 3001), message(codec, x)[1])


@pytest.mark.parametrize("written", [uncoded, lambda codec, x: message(codec, x)[0]])
def test_damage_is_an_error_and_nothing_is_written(
    written: Callable[[SparseCodec, torch.Tensor], torch.Tensor],
) -> None:
    codec = SparseCodec(0.2, 4)
    wire = written(codec, values(3001))
    for place in (0, 1, 4, 5, 8, 20, 200):  # lengths and mask
        hurt, out = wire.clone(), torch.full((3001,), torch.nan)
        hurt[place] ^= 0x57  # five bits: a mask never has the same count again
        with pytest.raises(CodingError):
            codec.decode(hurt, out)
        assert out.isnan().all()
    for short in (wire[:-1], wire[:5]):
        with pytest.raises(CodingError, match="sparse message"):
            codec.decode(short, torch.empty(3001))
    with pytest.raises(CodingError):
        codec.decode(wire, torch.empty(3100))


def test_a_mask_that_marks_values_past_the_end_is_an_error() -> None:
    codec = SparseCodec(0.2, 4)
    wire = uncoded(codec, values(12))
    mask = wire[8:10]
    mask[:] = torch.tensor([0x01, 0x10])  # two marks, as there must be; one is value 12
    with pytest.raises(CodingError, match="a mask of 12 values"):
        codec.decode(wire, torch.empty(12))


def test_what_compiled_code_cannot_write_is_rejected() -> None:
    codec = SparseCodec(0.2, 4)
    wire, _ = message(codec, values(1000))
    with pytest.raises(ValueError, match=r"a sum in torch\.bfloat16"):
        codec.decode_add(wire, torch.zeros(1000, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="seen has 1001 values"):
        codec.encode(values(1000), wire.new_empty(2000), torch.empty(1001))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_vector_on_a_gpu_gives_the_same_message() -> None:
    x, codec = values(5003), SparseCodec(0.2, 4)
    expected, seen = message(codec, x)
    found, seen_there = message(codec, x.cuda())
    assert torch.equal(found, expected)
    assert torch.equal(seen_there.cpu(), seen)
    out = torch.full((5003,), torch.nan, device="cuda")
    codec.decode(found, out)
    assert torch.equal(out.cpu(), seen)
