"""A message that is not the expected one is rejected, with both sides' values."""

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

CUT = Header(0, 16, 4, run_id=2**63 + 5, step=12, cut=6, microbatch=3, ids_crc=77, length=100)
EXCHANGE = ExchangeHeader(
    TO_SERVER, 48, 4, step=2**40, bucket=3, sender=1, digest=2**32 - 1, run_id=2**63 + 5
)


def message(header: Header | ExchangeHeader) -> torch.Tensor:
    nbytes = HEADER_NBYTES if header is CUT else EXCHANGE_HEADER_NBYTES
    wire = torch.arange(nbytes + 100, dtype=torch.uint8)
    header.write(wire)
    return wire


@pytest.mark.parametrize("header", [CUT, EXCHANGE])
def test_the_expected_message_passes_and_none_with_a_flipped_bit(
    header: Header | ExchangeHeader,
) -> None:
    wire = message(header)
    header.check(wire)
    for bit in range(8 * len(wire)):
        damaged = wire.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DesyncError):
            header.check(damaged)
    damaged = wire.clone()
    damaged[-1] ^= 4
    with pytest.raises(DesyncError, match="payload: its checksum differs"):
        header.check(damaged)


def test_bytes_of_an_exchange_are_where_the_map_has_them() -> None:
    head = bytes(message(EXCHANGE)[:EXCHANGE_HEADER_NBYTES].numpy())
    assert payload_nbytes(message(EXCHANGE)[:EXCHANGE_HEADER_NBYTES]) == 100
    assert EXCHANGE_HEADER_NBYTES == 48
    assert head[:8] == b"TPX1\x00\x30\x04\x00"
    places = {(8, 16): 2**63 + 5, (16, 24): 2**40, (24, 28): 3, (28, 32): 1, (40, 48): 100}
    for (first, last), value in {**places, (32, 36): 2**32 - 1}.items():
        assert int.from_bytes(head[first:last], "little") == value


@pytest.mark.parametrize(
    ("header", "field", "value", "words"),
    [
        (CUT, "direction", 1, "direction"),
        (CUT, "codec_id", 3, "codec_id"),
        (CUT, "bits", 8, "bits"),
        (CUT, "run_id", 6, "run_id"),
        (CUT, "step", 13, "step"),
        (CUT, "cut", 4, "cut"),
        (CUT, "microbatch", 2, "microbatch"),
        (CUT, "ids_crc", 78, "ids_crc"),
        (CUT, "length", 99, "length"),
        (CUT, "reserved", 1, "reserved"),
        (EXCHANGE, "phase", FROM_SERVER, r"phase \(0 to the server, 1 from it\)"),
        (EXCHANGE, "codec_id", 16, "codec id"),
        (EXCHANGE, "bits", 8, "bits per value"),
        (EXCHANGE, "step", 13, "exchange"),
        (EXCHANGE, "bucket", 4, "bucket"),
        (EXCHANGE, "sender", 2, "sending replica"),
        (EXCHANGE, "digest", 78, "digest of the global model"),
        (EXCHANGE, "run_id", 6, "run id"),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(
    header: Header | ExchangeHeader, field: str, value: int, words: str
) -> None:
    expected, sent = replace(header, **{field: value}), getattr(header, field)
    with pytest.raises(DesyncError, match=f"disagree; {words}: peer sent {sent}, expected {value}"):
        expected.check(message(header))


@pytest.mark.parametrize(
    ("phase", "words"),
    [(TO_SERVER, "message to the server"), (FROM_SERVER, "answer of the server")],
)
def test_exchange_bucket_and_replica_are_named(phase: int, words: str) -> None:
    expected = replace(EXCHANGE, phase=phase, step=12)
    with pytest.raises(DesyncError, match=f"^exchange 12, bucket 3, {words} from replica 1: "):
        expected.check(message(EXCHANGE))


def test_a_message_of_another_length_is_rejected() -> None:
    with pytest.raises(DesyncError, match="payload length: peer sent 100, expected 99"):
        EXCHANGE.check(message(EXCHANGE)[:-1])


@pytest.mark.parametrize(
    ("header", "wire", "magic"),
    [
        (EXCHANGE, message(CUT), "b'TPW2'"),
        (CUT, message(EXCHANGE), "b'TPX1'"),
        (CUT, torch.zeros(HEADER_NBYTES, dtype=torch.uint8), "b'.x00.*'"),
    ],
)
def test_other_bytes_are_not_taken_for_a_message(
    header: Header | ExchangeHeader, wire: torch.Tensor, magic: str
) -> None:
    with pytest.raises(DesyncError, match=rf"not a ThinPipe message \(magic {magic}\)"):
        header.check(wire)
