"""The compiled CPU kernels against the reference: equal bytes, equal values, equal memories."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.pipeline.wire import kernels as kernels_package
from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes, KernelSet, load_kernels
from thinpipe.pipeline.wire.kernels.cpu import uniform as numba_cpu
from thinpipe.pipeline.wire.kernels.cpu.compilation import source_digest

CPU = torch.device("cpu")
REFERENCE, NUMBA = load_kernels("reference", CPU), load_kernels("numba", CPU)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (9, 4), (1024, 128), (1500, 100), (3080, 768), (2050, 5000)]
NOISE = Noise(key=-12345678901234, step=2**31 + 7, row_B=torch.tensor([5, 2**40]))


def rows(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(seed)) * 3


def room(numel: int, bits: int, group: int, scale: torch.dtype, poison: int) -> Codes:
    payload = torch.full((2, bits * -(-numel // 8)), poison, dtype=torch.uint8)
    scales = torch.full((2, -(-numel // group)), torch.nan, dtype=scale)
    return Codes(payload, scales, bits, group)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_codes(one: Codes, other: Codes) -> bool:
    return same_bits(one.payload_BP, other.payload_BP) and same_bits(one.scale_BK, other.scale_BK)


def both_quantized(
    x: torch.Tensor, bits: int, group: int, scale: torch.dtype, noise: Noise | None
) -> tuple[Codes, Codes]:
    expected, found = (room(x.shape[1], bits, group, scale, poison) for poison in (0, 255))
    REFERENCE.quantize(x, expected, noise=noise)
    NUMBA.quantize(x, found, noise=noise)
    return expected, found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "group"), SHAPES)
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_codes_are_the_references_bit_for_bit(
    dtype: torch.dtype, numel: int, group: int, scale: torch.dtype
) -> None:
    x = rows(numel).to(dtype)
    for bits in range(1, 9):
        for noise in (None, NOISE) if bits > 1 else (None,):
            expected, found = both_quantized(x, bits, group, scale, noise)
            assert same_codes(found, expected), f"{bits} bits, {noise}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "group"), SHAPES)
def test_values_are_the_references_bit_for_bit(dtype: torch.dtype, numel: int, group: int) -> None:
    for bits in range(1, 9):
        codes, _ = both_quantized(rows(numel), bits, group, torch.bfloat16, None)
        expected, found = (torch.full((2, numel), torch.nan, dtype=dtype) for _ in range(2))
        REFERENCE.dequantize(codes, expected)
        NUMBA.dequantize(codes, found)
        assert same_bits(found, expected), f"{bits} bits"


SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2e-38, 1e38, -3e38, float("inf"), -float("inf"), float("nan")]


@given(
    bits=st.integers(1, 8),
    group=st.integers(1, 70),
    values=st.lists(
        st.one_of(st.floats(width=32), st.sampled_from(SPECIAL)), min_size=1, max_size=150
    ),
    scale=st.sampled_from([torch.bfloat16, torch.float32]),
    stochastic=st.booleans(),
)
@settings(max_examples=150)
def test_any_bit_pattern_gives_the_references_codes(
    bits: int, group: int, values: list[float], scale: torch.dtype, stochastic: bool
) -> None:
    x = torch.tensor([values, values[::-1]])
    noise = NOISE if stochastic and bits > 1 else None
    expected, found = both_quantized(x, bits, group, scale, noise)
    assert same_codes(found, expected)


def both_deltas(
    x: torch.Tensor, memory: torch.Tensor, bits: int, group: int, noise: Noise | None
) -> list[tuple[Codes, torch.Tensor, torch.Tensor]]:
    results = []
    for kernels, poison in ((REFERENCE, 0), (NUMBA, 255)):
        codes = room(x.shape[1], bits, group, torch.bfloat16, poison)
        fresh = torch.full_like(memory, torch.nan)
        finite = kernels.delta_encode(x, Cached(memory, fresh), codes, noise=noise)
        results.append((codes, fresh, finite))
    return results


@pytest.mark.parametrize(
    ("dtype", "memory_dtype"),
    [*((DTYPES[0], dtype) for dtype in DTYPES), (DTYPES[1], DTYPES[1])],
)
@pytest.mark.parametrize(("numel", "group"), [(1500, 100), (3080, 768)])
def test_changes_and_memories_are_the_references_bit_for_bit(
    dtype: torch.dtype, memory_dtype: torch.dtype, numel: int, group: int
) -> None:
    memory = rows(numel, 1).to(memory_dtype)
    x = (memory + 0.1 * rows(numel, 2)).to(dtype)
    for bits in range(1, 9):
        for noise in (None, NOISE) if bits > 1 else (None,):
            (expected, kept, _), (found, fresh, finite) = both_deltas(x, memory, bits, group, noise)
            assert same_codes(found, expected), f"{bits} bits, {noise}"
            assert same_bits(fresh, kept), f"{bits} bits, {noise}"
            assert finite.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_ends_on_different_backends_hold_equal_memories(dtype: torch.dtype, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    sent, received = torch.zeros(2, 1500, dtype=dtype), torch.zeros(2, 1500, dtype=dtype)
    ends: list[tuple[KernelSet, KernelSet]] = [(REFERENCE, NUMBA), (NUMBA, REFERENCE)]
    for step in range(10):
        x = torch.randn(2, 1500, generator=generator)
        sender, receiver = ends[step % 2]
        codes = room(1500, bits, 96, torch.bfloat16, 7)
        noise = Noise(3, step, torch.tensor([1, 2])) if bits > 1 else None
        sender.delta_encode(x, Cached(sent, sent), codes, noise=noise)  # in place
        out = torch.full_like(x, torch.nan)
        receiver.delta_decode(codes, Cached(received, received), out)
        assert same_bits(sent, received)
        assert torch.equal(out.to(dtype), received)


@pytest.mark.parametrize("kernels", [REFERENCE, NUMBA])
@pytest.mark.parametrize(
    ("bad", "before"),
    [
        *((float(name), 0.0) for name in ("nan", "inf", "-inf")),
        (3.402e38, 3.38e38),  # bf16 ends at 3.39e38
    ],
)
def test_a_row_whose_memory_would_not_be_finite_is_reported(
    kernels: KernelSet, bad: float, before: float
) -> None:
    x, memory = rows(700), rows(700, 1).bfloat16()
    x[1, 333], memory[1, 333] = bad, before
    codes = room(700, 4, 64, torch.bfloat16, 0)
    cached, out = Cached(memory, torch.empty_like(memory)), torch.empty_like(x)
    assert kernels.delta_encode(x, cached, codes, noise=None).tolist() == [True, False]
    assert kernels.delta_decode(codes, cached, out).tolist() == [True, False]


@pytest.mark.parametrize("kernels", [REFERENCE, NUMBA])
@pytest.mark.parametrize(
    ("memory_dtype", "dtype"),
    [*((DTYPES[0], dtype) for dtype in DTYPES), (DTYPES[1], DTYPES[1])],
)
def test_a_gpus_nan_stays_one_in_every_format(
    kernels: KernelSet, memory_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Its bits are all ones, and rounding to bf16 adds to them."""
    codes = room(700, 4, 64, torch.bfloat16, 0)
    kernels.quantize(rows(700), codes, noise=None)
    number = torch.int32 if memory_dtype == torch.float32 else torch.int16
    memory = torch.full((2, 700), torch.iinfo(number).max, dtype=number).view(memory_dtype)
    out, fresh = (torch.zeros(2, 700, dtype=dtype) for _ in range(2))
    assert not kernels.delta_decode(codes, Cached(memory, fresh), out).any()
    assert out.isnan().all()
    assert fresh.isnan().all()


@pytest.mark.parametrize("bits", [3, 4])
def test_rows_may_lie_anywhere_and_nothing_next_to_them_is_touched(bits: int) -> None:
    x = torch.randn(2, 1700)[:, 100:1600]
    nbytes = bits * -(-1500 // 8)
    wide = torch.full((2, nbytes + 64), 0xAA, dtype=torch.uint8)
    codes = room(1500, bits, 100, torch.bfloat16, 0)
    expected = room(1500, bits, 100, torch.bfloat16, 0)
    NUMBA.quantize(x, codes._replace(payload_BP=wide[:, 31 : 31 + nbytes]), noise=None)
    REFERENCE.quantize(x, expected, noise=None)
    assert torch.equal(wide[:, 31 : 31 + nbytes], expected.payload_BP)
    assert (wide[:, :31] == 0xAA).all()
    assert (wide[:, 31 + nbytes :] == 0xAA).all()
    out = torch.full((2, 1564), 5.0)
    NUMBA.dequantize(codes._replace(payload_BP=wide[:, 31 : 31 + nbytes]), out[:, 9:1509])
    assert (out[:, :9] == 5).all()
    assert (out[:, 1509:] == 5).all()
    assert not (out[:, 9:1509] == 5).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_other_formats_and_strides_are_converted(dtype: torch.dtype) -> None:
    x = torch.randn(900, 2, dtype=dtype).t()
    expected, found = both_quantized(x, 4, 64, torch.bfloat16, None)
    assert same_codes(found, expected)
    out = torch.empty(900, 2, dtype=dtype).t()
    NUMBA.dequantize(found, out)
    values = torch.empty(2, 900)
    REFERENCE.dequantize(found, values)
    assert torch.equal(out, values.to(dtype))


@pytest.mark.parametrize("shape", [(0, 64), (0, 1030), (2, 0)])
def test_no_rows_and_no_values_are_fine(shape: tuple[int, int]) -> None:
    rows_, numel = shape
    payload = torch.empty(rows_, 4 * -(-numel // 8), dtype=torch.uint8)
    codes = Codes(payload, torch.empty(rows_, -(-numel // 64), dtype=torch.bfloat16), 4, 64)
    memory, out = torch.empty(shape).bfloat16(), torch.empty(shape)
    for kernels in (REFERENCE, NUMBA):
        kernels.quantize(torch.empty(shape), codes, noise=None)
        kernels.dequantize(codes, out)
        finite = kernels.delta_encode(out, Cached(memory, memory), codes, noise=None)
        assert finite.shape == (rows_,)
        assert kernels.delta_decode(codes, Cached(memory, memory), out).all()


def test_threads_share_the_kernels() -> None:
    x = rows(50_000)
    expected = room(50_000, 4, 128, torch.bfloat16, 0)
    NUMBA.quantize(x, expected, noise=NOISE)

    def work(_: int) -> bool:
        codes = room(50_000, 4, 128, torch.bfloat16, 1)
        NUMBA.quantize(x, codes, noise=NOISE)
        return same_codes(codes, expected)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(20)))


_DIGESTS = """
import hashlib, sys, torch
from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.kernels.cpu import uniform as numba_cpu
from thinpipe.pipeline.wire.kernels import Codes
x = torch.linspace(-2, 3, 2000).reshape(2, 1000)
def room(bits):
    payload = torch.empty(2, bits * 125, dtype=torch.uint8)
    return Codes(payload, torch.empty(2, 8), bits, 128)
def plain(bits):
    codes, out = room(bits), torch.empty_like(x)
    numba_cpu.quantize(x, codes, noise=None)
    numba_cpu.dequantize(codes, out)
    return codes, out
def change(bits):
    codes, fresh = room(bits), torch.empty_like(x)
    numba_cpu.delta_encode(2 * x, Cached(x, fresh), codes, noise=None)
    return codes, fresh
found = {}
for word in sys.argv[1].split():
    name, bits = word.split(":")
    codes, other = globals()[name](int(bits))
    digest = hashlib.sha256(codes.payload_BP.numpy().data).hexdigest()
    found[word] = digest + str(other.double().sum().item())
print(sorted(found.items()))
"""
_ORDERS = ("plain:2 plain:7 change:4", "change:4 plain:7 plain:2")


@pytest.mark.slow
def test_code_from_the_cache_is_right_whatever_ran_first(tmp_path: Path) -> None:
    """numba links cached helpers by name and number: same-named ones came back as each other.

    It looks at the version of numba, the CPU, and the file of the outermost function. A helper in
    another file may have changed, so a digest of all of them is part of the name.
    """
    # what the user's own cache has already would not be compiled here
    places = {"NUMBA_CACHE_DIR": str(tmp_path / "code"), "XDG_CACHE_HOME": str(tmp_path / "user")}
    printed = {
        subprocess.run(
            [sys.executable, "-c", _DIGESTS, order],
            env={**os.environ, **places},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in (*_ORDERS, _ORDERS[0])
    }
    assert len(printed) == 1
    assert len(printed.pop()) > 100
    names = [path.name for path in (tmp_path / "code").iterdir()]
    assert names
    assert all(source_digest(numba_cpu.__name__) in name for name in names)


def test_an_edit_of_any_source_of_the_room_changes_the_digest(tmp_path: Path) -> None:
    """Code from another version is never found: what a kernel may be made of is in its name."""
    room = tmp_path / "pipeline" / "wire" / "kernels"
    shutil.copytree(Path(kernels_package.__file__).parent, room)
    found = {source_digest(numba_cpu.__name__, tmp_path)}
    assert found == {source_digest(numba_cpu.__name__)}
    for edited in ("__init__.py", "rans.py", "cpu/rows.py", "cpu/llvm/vector_ir.py"):
        path = room / edited
        path.write_text(path.read_text(encoding="utf-8") + "# edited\n")
        source_digest.cache_clear()
        found.add(source_digest(numba_cpu.__name__, tmp_path))
    source_digest.cache_clear()
    assert len(found) == 5


def test_auto_is_numba_on_a_cpu() -> None:
    assert load_kernels("auto", CPU) is NUMBA
