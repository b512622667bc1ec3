"""A message between replicas that is not the expected one is rejected, in plain words."""

from dataclasses import replace

import pytest
import torch

from thinpipe.pipeline.wire.exchange_header import (
    EXCHANGE_HEADER_NBYTES,
    FROM_SERVER,
    TO_SERVER,
    ExchangeHeader,
    payload_nbytes,
)
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError, Header

HEADER = ExchangeHeader(
    phase=TO_SERVER,
    codec_id=48,
    bits=4,
    step=2**40,
    bucket=3,
    sender=1,
    digest=2**32 - 1,
    run_id=2**63 + 5,
)


def message() -> torch.Tensor:
    wire = torch.arange(EXCHANGE_HEADER_NBYTES + 100, dtype=torch.uint8)
    HEADER.write(wire)
    return wire


def test_the_expected_message_passes_and_bytes_are_where_the_map_has_them() -> None:
    HEADER.check(message())
    assert payload_nbytes(message()[:EXCHANGE_HEADER_NBYTES]) == 100
    head = bytes(message()[:EXCHANGE_HEADER_NBYTES].numpy())
    assert EXCHANGE_HEADER_NBYTES == 48
    assert head[:8] == b"TPX1\x00\x30\x04\x00"
    places = {(8, 16): 2**63 + 5, (16, 24): 2**40, (24, 28): 3, (28, 32): 1, (40, 48): 100}
    for (first, last), value in {**places, (32, 36): 2**32 - 1}.items():
        assert int.from_bytes(head[first:last], "little") == value


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("phase", FROM_SERVER, r"phase \(0 to the server, 1 from it\)"),
        ("codec_id", 16, "codec id"),
        ("bits", 8, "bits per value"),
        ("step", 13, "exchange"),
        ("bucket", 4, "bucket"),
        ("sender", 2, "sending replica"),
        ("digest", 78, "digest of the global model"),
        ("run_id", 6, "run id"),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(field: str, value: int, words: str) -> None:
    expected = replace(HEADER, **{field: value})
    sent = getattr(HEADER, field)
    with pytest.raises(DesyncError, match=f"disagree; {words}: peer sent {sent}, expected {value}"):
        expected.check(message())


@pytest.mark.parametrize(
    ("phase", "words"),
    [(TO_SERVER, "message to the server"), (FROM_SERVER, "answer of the server")],
)
def test_exchange_bucket_and_replica_are_named(phase: int, words: str) -> None:
    expected = replace(HEADER, phase=phase, step=12)
    with pytest.raises(DesyncError, match=f"^exchange 12, bucket 3, {words} from replica 1: "):
        expected.check(message())


def test_a_flipped_bit_anywhere_is_found() -> None:
    for bit in range(8 * len(message())):
        wire = message()
        wire[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DesyncError):
            HEADER.check(wire)


def test_a_message_of_another_length_is_rejected() -> None:
    with pytest.raises(DesyncError, match="payload length: peer sent 100, expected 99"):
        HEADER.check(message()[:-1])


def test_a_message_over_a_cut_is_not_taken_for_one() -> None:
    wire = torch.zeros(HEADER_NBYTES, dtype=torch.uint8)
    Header(0, 16, 4, 0, 0, 6, 0, 0, 0).write(wire)
    with pytest.raises(DesyncError, match=r"not a ThinPipe message \(magic b'TPW2'\)"):
        HEADER.check(wire)
