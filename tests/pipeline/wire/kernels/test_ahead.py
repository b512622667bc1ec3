"""Every CUDA kernel is compiled for every kind of GPU, and takes what the table says."""

import json
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from tests.pipeline.wire.kernels.ahead import CAPABILITIES, KERNELS, compiled, resources  # noqa: E402

QUICK = (80, 90)
TABLE = json.loads(Path(__file__).with_name("resources.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "capability",
    [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CAPABILITIES],
)
def test_kernels_take_what_the_table_says_and_round_once(capability: int) -> None:
    """Another version of Triton may share out registers otherwise; it must not spill either."""
    found = {}
    for name in KERNELS:
        kernel = compiled(name, capability)
        found[name], ptx = resources(kernel), kernel.asm["ptx"]
        assert found[name]["spilled"] == 0, name
        assert found[name]["registers"] <= 96, name
        assert "fma." not in ptx, name  # a product and a sum round once each
        assert ".ftz" not in ptx, name  # small values are not flushed to zero
    if triton.__version__ == TABLE["triton"]:
        assert found == TABLE[f"sm_{capability}"]


@pytest.mark.parametrize("name", ["scale", "encode", "decode"])
def test_values_are_loaded_16_bytes_at_a_time(name: str) -> None:
    assert "ld.global.v4.b32" in compiled(name, 90).asm["ptx"]
