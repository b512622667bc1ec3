"""The kernel benchmark measures what it says and refuses wrong kernels."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks.harness import Records
from benchmarks.kernels import run as kernels
from benchmarks.kernels.run import Buffers
from thinpipe.pipeline.wire.kernels import Codes
from thinpipe.pipeline.wire.kernels.cpu import uniform as numba_cpu


def test_rows_are_of_every_kernel_and_hold_rates(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*kernels.ours(Buffers(2, 1 << 13, 4), "numba", 2)]
    rows += kernels.top(Buffers(1, 1 << 14, 1), 2)
    assert all(row.melem_s > 0 and row.floor_melem_s > 0 for row in rows)
    assert {row.threads for row in rows if row.backend == "numba" and row.bits == 4} == {2}
    assert {row.backend for row in rows if row.kernel == "top_1%"} == {"numba", "torch", "numpy"}
    names = {(row.kernel, row.rounding) for row in rows if row.bits == 4}
    encodes = {(k, r) for k in ("quantize", "delta_encode") for r in ("nearest", "stochastic")}
    assert names == {*encodes, ("dequantize", "nearest"), ("delta_decode", "nearest")}
    kernels.publish(rows[0], Records(None))
    assert f"{asdict(rows[0])['melem_s']:.0f} M/s" in capsys.readouterr().out


@pytest.mark.parametrize("bits", [1, 4])
def test_our_kernels_pass_the_check(bits: int) -> None:
    kernels.check(bits)


def test_a_kernel_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(codes: Codes, out_BN: torch.Tensor, **_: Any) -> None:
        out_BN.zero_()

    monkeypatch.setattr(numba_cpu, "dequantize", wrong)
    with pytest.raises(RuntimeError, match="dequantize, 4 bits, nearest: not the reference's"):
        kernels.check(4)
