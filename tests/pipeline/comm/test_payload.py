"""Payloads coded with tables of their own come back whole, or are errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.pipeline.comm.payload import Rows, compress_codes, expand_codes, rows_of
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.coding.entropy import CodingError, compress
from thinpipe.pipeline.wire.uniform import Uniform

NUMEL, WIDTH = 4096, 64


def quantized(codec: Uniform | Cast, samples: int = 4) -> tuple[Tensor, Rows]:
    x_BN = torch.randn(samples, NUMEL, generator=torch.Generator().manual_seed(samples))
    wire_BW = torch.empty(samples, codec.capacity(NUMEL), dtype=torch.uint8)
    codec.encode(x_BN, wire_BW)
    return wire_BW.flatten(), rows_of(codec, samples, wire_BW.shape[1], NUMEL)


def at_rate(rate: float) -> Uniform:
    return Uniform(4, WIDTH, rate=rate)


def coded(payload: Tensor, *rows: Rows) -> Tensor:
    room = torch.empty_like(payload)
    length = compress_codes(payload, room, rows)
    assert length is not None
    return room[:length].clone()


def expanded(wire: Tensor, payload: Tensor, *rows: Rows) -> Tensor:
    out = torch.full_like(payload, 255)
    expand_codes(wire, out, rows)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_codes_of_any_width_come_back(bits: int) -> None:
    payload, rows = quantized(Uniform(bits, NUMEL))
    wire = coded(payload, rows)
    assert torch.equal(expanded(wire, payload, rows), payload)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_parts_come_back(data: st.DataObject) -> None:
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows, pieces = [], [torch.empty(0, dtype=torch.uint8)]
    for samples in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        nbytes = data.draw(st.integers(1, 3000))
        part = Rows(
            samples, nbytes, data.draw(st.integers(0, nbytes)), data.draw(st.integers(1, 8))
        )
        rows.append(part)
        top = data.draw(st.sampled_from([2, 16, 50, 256]))
        pieces.append(torch.randint(top, (samples * nbytes,), generator=draws).to(torch.uint8))
    payload = torch.cat(pieces)
    room = torch.full_like(payload, 7)
    length = compress_codes(payload, room, rows)
    if length is None:
        assert (room == 7).all()
    else:
        assert length < payload.numel()
        assert torch.equal(expanded(room[:length], payload, *rows), payload)


@pytest.mark.parametrize(("rate", "share"), [(1.0, 1.0), (2.0, 0.9), (4.0, 0.7)])
def test_few_bits_take_fewer_than_with_zstd(rate: float, share: float) -> None:
    payload, rows = quantized(at_rate(rate), 64)
    room = torch.empty_like(payload)
    length = compress(payload, room)
    assert length is not None
    codes = coded(payload, rows).numel() - rows.samples * rows.split
    assert codes < share * (length - rows.samples * rows.split)


def test_first_visits_and_changes_have_tables_of_their_own() -> None:
    (first, first_rows), (known, known_rows) = (
        quantized(Uniform(8, NUMEL)),
        quantized(at_rate(2)),
    )
    payload = torch.cat([first, known])
    together = coded(payload, first_rows, known_rows)
    assert together.numel() == coded(first, first_rows).numel() + coded(known, known_rows).numel()
    assert torch.equal(expanded(together, payload, first_rows, known_rows), payload)


def test_rows_without_codes_stay_as_they_are() -> None:
    payload, rows = quantized(Cast("bf16"))
    assert rows.streams == 0
    assert compress_codes(payload, torch.empty_like(payload), [rows]) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_damage_is_noticed_or_changes_values(bits: int) -> None:
    payload, rows = quantized(Uniform(bits, NUMEL), 1)
    wire = coded(payload, rows)
    draws = torch.Generator().manual_seed(bits)
    for _ in range(2000):
        kind, at = (int(n) for n in torch.randint(wire.numel(), (2,), generator=draws))
        damaged = wire.clone()
        if kind % 4:
            damaged[at] ^= 1 << kind % 8
        elif kind % 8:
            damaged = damaged[:at]
        else:
            damaged = torch.cat([damaged, damaged[: 1 + at]])
        try:
            out = expanded(damaged, payload, rows)
        except CodingError:
            continue
        assert damaged.numel() == wire.numel()
        assert not torch.equal(out, payload)
        # Neither scales nor stored blocks are checked here: the header has a checksum.
        assert at < rows.split or bits == 8
