"""The kernel benchmark measures what it says, refuses wrong kernels, and its rows make tables."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import Records
from benchmarks.kernels import report as kernels_report
from benchmarks.kernels import run as kernels
from benchmarks.kernels.cases import Buffers
from thinpipe.pipeline.wire.kernels import Codes
from thinpipe.pipeline.wire.kernels.cpu import uniform as numba_cpu

KEYS = (
    *("kernel", "backend", "bits", "dtype", "rounding", "elements", "threads"),
    *("melem_s", "gb_s", "floor_melem_s", "share"),
)


def test_rows_hold_exactly_the_agreed_keys_and_make_a_report(tmp_path: Path) -> None:
    buffers = Buffers(2, 1 << 13, 4)
    rows = [kernels.copy(buffers, 2), *kernels.ours(buffers, "numba", 2)]
    rows += kernels.top(Buffers(1, 1 << 14, 1), 2)
    assert all(tuple(asdict(row)) == KEYS for row in rows)
    assert all(row.melem_s > 0 and row.floor_melem_s > 0 for row in rows)
    assert {row.threads for row in rows if row.backend == "numba" and row.bits == 4} == {2}
    path = tmp_path / "rows.jsonl"
    records = Records(path)
    for row in rows:
        kernels.publish(row, records)
    found = kernels_report.load([path])
    assert len(found) == len(rows)
    table = kernels_report.own_table(found)
    assert "delta_decode, nearest" in table
    assert "top_1%, none" in kernels_report.backend_table(found, 1 << 14, 4)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_our_kernels_pass_the_check(bits: int) -> None:
    kernels.check(bits)


def test_a_kernel_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(codes: Codes, out_BN: torch.Tensor, **_: Any) -> None:
        out_BN.zero_()

    monkeypatch.setattr(numba_cpu, "dequantize", wrong)
    with pytest.raises(RuntimeError, match="dequantize, 4 bits, nearest: not the reference's"):
        kernels.check(4)
