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

from tests.pipeline.wire.kernels.uniform import CPU, Case, differing, keeps_nan, room, rows
from thinpipe.pipeline.wire import kernels as kernels_package
from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import KernelSet, load_kernels
from thinpipe.pipeline.wire.kernels.cpu import uniform as numba_cpu
from thinpipe.pipeline.wire.kernels.cpu.compilation import source_digest

REFERENCE, NUMBA = load_kernels("reference", CPU), load_kernels("numba", CPU)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (9, 4), (1024, 128), (1500, 100), (3080, 768), (2050, 5000)]
NOISE = Noise(key=-12345678901234, step=2**31 + 7, row_B=torch.tensor([5, 2**40]))
FORMATS = [*((DTYPES[0], dtype) for dtype in DTYPES), (DTYPES[1], DTYPES[1])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("dtype", "memory_dtype"), FORMATS)
@pytest.mark.parametrize(("numel", "group"), SHAPES)
@pytest.mark.parametrize("scale", DTYPES)
def test_compiled_kernels_are_the_reference_bit_for_bit(
    dtype: torch.dtype, memory_dtype: torch.dtype, numel: int, group: int, scale: torch.dtype
) -> None:
    shape, formats = (numel, group), (dtype, memory_dtype, scale)
    cases = [Case(bits, *shape, *formats) for bits in range(1, 9)]
    cases += [case._replace(noise=NOISE) for case in cases[1:]]
    assert differing(cases, "numba") == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_other_formats_and_strides_are_converted(dtype: torch.dtype) -> None:
    assert differing([Case(4, 900, 64, dtype, strided=True)], "numba") == []


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
    expected, found = (room(x.shape[1], bits, group, scale, poison=poison) for poison in (0, 255))
    REFERENCE.quantize(x, expected, noise=noise)
    NUMBA.quantize(x, found, noise=noise)
    assert same_bits(found.payload_BP, expected.payload_BP)
    assert same_bits(found.scale_BK, expected.scale_BK)


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
    codes = room(700, 4, 64)
    cached, out = Cached(memory, torch.empty_like(memory)), torch.empty_like(x)
    assert kernels.delta_encode(x, cached, codes, noise=None).tolist() == [True, False]
    assert kernels.delta_decode(codes, cached, out).tolist() == [True, False]


@pytest.mark.parametrize("name", ["reference", "numba"])
@pytest.mark.parametrize(("memory_dtype", "dtype"), FORMATS)
def test_a_gpus_nan_stays_one_in_every_format(
    name: str, memory_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    assert keeps_nan(name, CPU, memory_dtype, dtype)


@pytest.mark.parametrize("bits", [3, 4])
def test_rows_may_lie_anywhere_and_nothing_next_to_them_is_touched(bits: int) -> None:
    x = torch.randn(2, 1700)[:, 100:1600]
    nbytes = bits * -(-1500 // 8)
    wide = torch.full((2, nbytes + 64), 0xAA, dtype=torch.uint8)
    codes, expected = room(1500, bits, 100), room(1500, bits, 100)
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


def test_threads_share_the_kernels() -> None:
    x = rows(50_000)
    expected = room(50_000, 4, 128)
    NUMBA.quantize(x, expected, noise=NOISE)

    def work(_: int) -> bool:
        codes = room(50_000, 4, 128, poison=0)
        NUMBA.quantize(x, codes, noise=NOISE)
        same_scales = torch.equal(codes.scale_BK, expected.scale_BK)
        return same_scales and torch.equal(codes.payload_BP, expected.payload_BP)

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
