"""A message that is not the expected one is rejected, with both sides' values."""

from dataclasses import replace

import pytest
import torch

from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError, Header

HEADER = Header(
    direction=0,
    codec_id=16,
    bits=4,
    run_id=2**63 + 5,
    step=12,
    cut=6,
    microbatch=3,
    ids_crc=77,
    length=100,
)


def message() -> torch.Tensor:
    wire = torch.arange(HEADER_NBYTES + 100, dtype=torch.uint8)
    HEADER.write(wire)
    return wire


def test_the_expected_message_passes() -> None:
    HEADER.check(message())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("direction", 1),
        ("codec_id", 3),
        ("bits", 8),
        ("run_id", 6),
        ("step", 13),
        ("cut", 4),
        ("microbatch", 2),
        ("ids_crc", 78),
        ("length", 99),
        ("reserved", 1),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(field: str, value: int) -> None:
    expected = replace(HEADER, **{field: value})
    sent = getattr(HEADER, field)
    with pytest.raises(DesyncError, match=f"{field}: peer sent {sent}, expected {value}"):
        expected.check(message())


@pytest.mark.parametrize("position", [HEADER_NBYTES, HEADER_NBYTES + 50, HEADER_NBYTES + 99])
def test_a_flipped_bit_in_the_payload_is_found(position: int) -> None:
    wire = message()
    wire[position] ^= 4
    with pytest.raises(DesyncError, match="checksum differs"):
        HEADER.check(wire)


def test_foreign_bytes_are_not_taken_for_a_message() -> None:
    with pytest.raises(DesyncError, match="not a ThinPipe message"):
        HEADER.check(torch.zeros(HEADER_NBYTES + 100, dtype=torch.uint8))
