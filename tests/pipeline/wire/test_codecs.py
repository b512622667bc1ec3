"""Laws of all codecs of fixed size."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.wire.codecs import bursts, rows, through, using
from thinpipe.pipeline.wire.cast import Cast, CastFormat
from thinpipe.pipeline.wire.codec import Cached, Codec
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.kernels import Backend
from thinpipe.pipeline.wire.sparse import SparseCodec
from thinpipe.pipeline.wire.tile_topk import TileTopK
from thinpipe.pipeline.wire.uniform import Uniform

CASTS: list[Codec] = [Cast("fp32"), Cast("bf16"), Cast("fp16")]
QUANTIZERS: list[Codec] = [
    *(Uniform(bits, 64) for bits in range(1, 9)),
    *(Hadamard(bits) for bits in range(2, 8)),
]
QUANTIZER = pytest.mark.parametrize("codec", QUANTIZERS, ids=str)
ANY = st.one_of(
    st.sampled_from([*CASTS, *QUANTIZERS]),
    st.builds(Uniform, st.integers(1, 8), st.integers(1, 300), st.sampled_from(["bf16", "fp32"])),
)


@given(
    codec=ANY,
    numel=st.integers(1, 3000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120)
def test_seen_is_what_the_peer_decodes(
    codec: Codec, numel: int, dtype: torch.dtype, seed: int
) -> None:
    x = bursts(3, numel, seed).to(dtype)
    out, seen = through(codec, x)
    assert torch.equal(out, seen)
    # a rotated tile's step is at most its peak / (2^(b-2) + 0.5), as of others; at 1 bit it is the
    # peak, and half a tile may lose its sign
    worst = 1.2 if codec == Hadamard(2) else 1.0
    assert codec == Cast("fp16") or (out.float() - x.float()).norm() <= x.float().norm() * worst


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_are_exact_where_their_format_holds_the_values(
    name: CastFormat, dtype: torch.dtype
) -> None:
    x = torch.randn(3, 37).to(dtype)
    exact = torch.equal(through(Cast(name), x)[0], x)
    assert exact == (name == "fp32" or dtype == torch.bfloat16)


def test_fp16_overflow_is_infinite_not_silent() -> None:
    assert through(Cast("fp16"), torch.tensor([[1e5]]))[0].isinf().all()


@pytest.mark.parametrize("nbytes", [0, 1, 19, 21])
def test_a_cast_row_of_another_length_is_an_error(nbytes: int) -> None:
    """One byte, above all, which a copy would repeat for all values."""
    out_BN = torch.zeros(1, 10)
    with pytest.raises(CodingError, match=f"{nbytes} bytes, where 20 are needed"):
        Cast("bf16").decode(torch.ones(1, nbytes, dtype=torch.uint8), out_BN)
    assert not out_BN.any()


@pytest.mark.parametrize("codec", [*CASTS, Uniform(3, 64), Hadamard(3)], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (0, 1030), (3, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_no_rows_and_no_values_are_fine(
    codec: Codec, shape: tuple[int, int], backend: Backend
) -> None:
    with using(backend):
        out, seen = through(codec, torch.empty(shape))
        assert out.shape == seen.shape == shape
        if isinstance(codec, Uniform | Hadamard):
            cached = Cached(seen.bfloat16(), seen.bfloat16())
            wire = torch.empty(len(out), codec.capacity(shape[1]), dtype=torch.uint8)
            finite = codec.encode_change(out, cached, wire, noise=None)
            assert finite.tolist() == codec.decode_change(wire, cached, out).tolist()
            assert finite.tolist() == [True] * len(out)


@QUANTIZER
def test_zero_rows_stay_zero(codec: Codec) -> None:
    out, seen = through(codec, torch.zeros(2, 200))
    assert (out == 0).all()
    assert (seen == 0).all()


@given(codec=st.sampled_from(QUANTIZERS), exponent=st.integers(-40, 20))
@settings(max_examples=40)
def test_decoding_scales_with_the_input(codec: Codec, exponent: int) -> None:
    x, factor = bursts(2, 1000), 2.0**exponent
    assert torch.equal(through(codec, x * factor)[0], through(codec, x)[0] * factor)


@pytest.mark.parametrize("codec", [Uniform(4, 64), Hadamard(4)], ids=str)
@pytest.mark.parametrize("magnitude", [1e-38, 1e30, 3e38])
def test_extreme_magnitudes_stay_finite(codec: Codec, magnitude: float) -> None:
    assert through(codec, rows(1, 640).clamp(-1, 1) * magnitude)[0].isfinite().all()


@QUANTIZER
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_turns_its_group_to_nan_and_no_other(codec: Codec, bad: float) -> None:
    x = rows(2, 256)
    x[1, 70] = bad
    out, seen = through(codec, x)
    assert out[1, 64:128].isnan().all()
    assert int(out.isfinite().sum()) == 512 - 64
    assert torch.equal(out.nan_to_num(9.0), seen.nan_to_num(9.0))


@pytest.mark.parametrize("codec", [*CASTS, Uniform(3, 8), Hadamard(3)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(codec: Codec) -> None:
    x = bursts(5, 700)
    alone = torch.cat([through(codec, row.unsqueeze(0))[0] for row in x])
    assert torch.equal(through(codec, x)[0], alone)


@pytest.mark.parametrize(
    ("codec", "rate"),
    [(Uniform(2, 64), 0.75), (Uniform(4, 64), 0.3), (Hadamard(2), 0.8), (Hadamard(4), 0.3)],
    ids=str,
)
def test_visiting_the_same_value_again_contracts_the_error(codec: Codec, rate: float) -> None:
    """AQ-SGD's recursion on a fixed activation with outliers (Assumption on c_Q, section 3)."""
    x = rows(1, 4096)
    x[0, ::500] *= 30
    for value in (x, bursts(1, 4096)) if isinstance(codec, Hadamard) else (x,):
        memory = torch.zeros_like(value)
        for _ in range(6):
            before = (value - memory).norm()
            memory += through(codec, value - memory)[0]
            after = (value - memory).norm()
            assert after <= rate * before or after < 1e-5 * value.norm()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Uniform, {"bits": 0, "group": 64}, "bits = 0"),
        (Uniform, {"bits": 9, "group": 64}, "bits = 9"),
        (Uniform, {"bits": 4, "group": 0}, "group = 0"),
        (Uniform, {"bits": 1, "group": 64, "stochastic": True}, "1 bit"),
        (Hadamard, {"bits": 1}, "bits = 1: use 2 to 7"),
        (Hadamard, {"bits": 8}, "bits = 8"),
        (SparseCodec, {"fraction": 0.0, "bits": 4}, "fraction = 0.0"),
        (SparseCodec, {"fraction": 1.1, "bits": 4}, "fraction = 1.1"),
        (SparseCodec, {"fraction": 0.1, "bits": 0}, "bits = 0"),
        (SparseCodec, {"fraction": 0.1, "bits": 12}, "bits = 12"),
        (SparseCodec, {"fraction": 0.1, "bits": 4, "group": 0}, "group = 0"),
        *(
            (TileTopK, {"kept": kept, "bits": 1}, f"kept = {kept}: use an even number")
            for kept in (0, 3, 4098)
        ),
    ],
)
def test_wrong_options_are_rejected(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
