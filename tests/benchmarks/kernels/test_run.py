"""The kernel benchmark measures what it says and rejects wrong kernels."""

from typing import Any

import pytest
import torch

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels.__main__ import Buffers
from thinpipe.pipeline.wire.kernels import Codes
from thinpipe.pipeline.wire.kernels.cpu import uniform as numba_cpu


def test_rows_are_of_every_kernel_and_hold_rates() -> None:
    rows = [*kernels.ours(Buffers(2, 1 << 13, 4), "numba", 2)]
    rows += kernels.top(Buffers(1, 1 << 14, 1), 2)
    assert all(number > 0 for row in rows for number in row.numbers.values() if number is not None)
    about = [(row.method, row.conditions) for row in rows]
    assert {at["threads"] for _, at in about if at["bits"] == 4} == {2}
    assert {at["backend"] for name, at in about if name == "top_1%"} == {"numba", "torch", "numpy"}
    names = {(name, at["rounding"]) for name, at in about if at["bits"] == 4}
    encodes = {(k, r) for k in ("quantize", "delta_encode") for r in ("nearest", "stochastic")}
    assert names == {*encodes, ("dequantize", "nearest"), ("delta_decode", "nearest")}


@pytest.mark.parametrize("bits", [1, 4])
def test_our_kernels_pass_the_check(bits: int) -> None:
    kernels.check(bits)


def test_a_kernel_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(codes: Codes, out_BN: torch.Tensor, **_: Any) -> None:
        out_BN.zero_()

    monkeypatch.setattr(numba_cpu, "dequantize", wrong)
    with pytest.raises(RuntimeError, match="dequantize, 4 bits, nearest: not the reference's"):
        kernels.check(4)
