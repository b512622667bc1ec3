"""The kernels as torch operators: they keep torch's rules and fit in one compiled graph."""

from typing import Any

import pytest
import torch

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Codes, load_kernels, registered

NUMBA = load_kernels("numba", torch.device("cpu"))
NOISE = Noise(2**63 + 5, 3, torch.tensor([4, 9]))


def room() -> Codes:
    payload, scale = torch.zeros(2, 512, dtype=torch.uint8), torch.zeros(2, 8)
    return Codes(payload, scale.bfloat16(), 4, 128)


def filled(x: torch.Tensor) -> Codes:
    codes = room()
    NUMBA.quantize(x, codes, noise=None)
    return codes


def arguments(name: str) -> tuple[Any, ...]:
    x, memory = torch.randn(2, 1024), torch.randn(2, 1024).bfloat16()
    words = (5, 3, torch.tensor([4, 9]))
    fresh = torch.zeros_like(memory)
    return {
        "quantize": (x, *room(), *words, 0.7, [0, 1]),
        "dequantize": (*filled(x), torch.zeros_like(x), None),
        "delta_encode": (x, memory, *room(), fresh, 0, 0, None, None, None),
        "delta_decode": (*filled(x), memory, fresh, torch.zeros_like(x), [0, 1]),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantize", "dequantize", "delta_encode", "delta_decode"])
def test_operators_keep_torchs_rules(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.thinpipe, name).default, arguments(name))


def round_trip(x: torch.Tensor, memory: torch.Tensor, noise: Noise | None) -> list[torch.Tensor]:
    codes, fresh, out = room(), torch.empty_like(memory), torch.empty_like(x)
    finite = registered.delta_encode(2 * x, memory, codes, fresh, noise=noise)
    kept = torch.empty_like(memory)
    registered.delta_decode(codes, memory, kept, out)
    registered.quantize(out + 1, codes, noise=None)
    registered.dequantize(codes, out)
    return [fresh, kept, out + 1, finite]


@pytest.mark.parametrize("noise", [None, NOISE])
def test_a_compiled_graph_holds_them_and_gives_the_same_bits(noise: Noise | None) -> None:
    x, memory = torch.randn(2, 1024), torch.randn(2, 1024).bfloat16()
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    for expected, found in zip(
        round_trip(x, memory, noise), compiled(x, memory, noise), strict=True
    ):
        assert torch.equal(expected, found)


def test_they_are_the_backends_functions() -> None:
    x, codes, expected = torch.randn(2, 1024), room(), room()
    registered.quantize(x, codes, noise=NOISE)
    NUMBA.quantize(x, expected, noise=NOISE)
    assert torch.equal(codes.payload_BP, expected.payload_BP)
    registered.quantize(x, codes, noise=None, rate=0.7, blocks=range(1))
    NUMBA.quantize(x, expected, noise=None, rate=0.7)
    assert torch.equal(codes.payload_BP, expected.payload_BP)
    assert torch.equal(codes.scale_BK, expected.scale_BK)
