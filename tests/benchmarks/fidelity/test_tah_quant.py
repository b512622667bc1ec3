"""TAH-Quant as a baseline: its bytes, its choices, and what it decodes."""

import math

import pytest
import torch

from benchmarks.fidelity.tah_quant import TahQuant, send_with
from benchmarks.single_process import in_process
from tests.training import batch, config
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.header import HEADER_NBYTES


def rows(count: int, numel: int) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(0))


def through(codec: TahQuant | Hadamard, x: torch.Tensor) -> torch.Tensor:
    wire = torch.full((x.shape[0], codec.capacity(x.shape[1])), 0xAA, dtype=torch.uint8)
    seen, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    assert codec.encode(x, wire, seen) == wire.shape[1]
    codec.decode(wire, out)
    assert torch.equal(out.nan_to_num(9.0), seen.nan_to_num(9.0))
    return out


def test_a_value_takes_the_published_bits_and_a_flag() -> None:
    """4.41 bits with 80 % of the tiles at 4 bits; a flag per tile is what they do not count."""
    numel = 1024 * 1600
    assert 8 * TahQuant(1600).capacity(numel) / numel == pytest.approx(4.409 + 1 / 64, abs=0.001)
    assert 8 * TahQuant(1600, raised=0.0).capacity(numel) / numel == pytest.approx(3 + 40 / 64)


@pytest.mark.parametrize("width", [64, 100, 16])
@pytest.mark.parametrize("raised", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_values_land_within_half_a_step(width: int, raised: float, bits: int) -> None:
    x = rows(3, 20 * width)
    out = through(TahQuant(width, bits, raised), x)
    spread = float(x.max() - x.min())
    assert (out - x).abs().max() <= 0.51 * spread / (2**bits - 1)


def test_a_pivot_is_spread_and_the_rest_of_its_tile_survives() -> None:
    x = rows(1, 640)
    x[0, 70] = 1000.0
    out = through(TahQuant(640, raised=1.0), x)
    rest = torch.arange(640) != 70
    assert abs(out[0, 70] - 1000.0) < 30
    other = (torch.arange(640) // 64 != 1) & rest
    assert torch.equal(out[0, other], through(TahQuant(640, raised=1.0), rows(1, 640))[0, other])


def test_tiles_with_even_values_have_the_fourth_bit() -> None:
    x = torch.cat([torch.full((1, 64), 1.0), torch.zeros(1, 64)], 1)
    x[0, :64:2] = -1.0  # entropy log 64
    x[0, 64:66] = 1.0  # entropy log 2
    x[0, 0], x[0, 66] = 0.5, 0.5
    out = through(TahQuant(128, raised=0.5), x)
    assert abs(out[0, 0] - 0.5) <= 1 / 15
    assert abs(out[0, 66] - 0.5) == pytest.approx(1 / 14, abs=0.003)  # 3/7 or 4/7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_fault_is_not_hidden(bad: float) -> None:
    x = rows(2, 256)
    x[1, 70] = bad
    out = through(TahQuant(256), x)
    assert out[1, 64:128].isnan().all()
    assert torch.isfinite(out[0]).all()


@pytest.mark.parametrize("value", [0.0, 5.0, 3.3e38, -3.3e38, 1e-38])
def test_constant_rows_come_back(value: float) -> None:
    x = torch.full((1, 128), value)
    assert torch.allclose(through(TahQuant(128), x), x, rtol=2**-8)


def test_a_run_in_one_process_sends_with_it() -> None:
    run = config(boundary=[{way: {"kind": "raw"} for way in ("forward", "backward")}])
    width = run.message_shape[-1]
    with in_process(run, total_steps=2) as built:
        send_with(built, {"forward": TahQuant(width)})
        totals = built.engine.train_step(batch([*range(8)]), 0)
    forward, backward = totals.wire
    bare = forward.nbytes - HEADER_NBYTES * forward.messages
    assert bare == TahQuant(width).capacity(forward.values // 8) * 8
    assert backward.nbytes > 4 * backward.values
    assert forward.error is not None
    assert 0 < forward.error < 0.3
    assert backward.error == 0
