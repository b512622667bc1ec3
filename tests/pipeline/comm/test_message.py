"""Messages whose payloads are entropy-coded: the same values in fewer bytes, still checked."""

from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.training import batch, config, single_process, train_steps
from thinpipe.pipeline.comm.boundary import Stateless, raw
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError
from thinpipe.pipeline.wire.told import FORWARD
from thinpipe.pipeline.wire.uniform import Uniform

SHAPE = torch.Size((4, 32, 64))
IDS = torch.tensor([4, 9, 2, 7])
QUANTIZED = Uniform(4, 1 << 20)


def message_codec(codec: Codec = QUANTIZED, **options: Any) -> MessageCodec:
    boundaries: Any = {"train": Stateless(codec), "eval": raw()}
    return MessageCodec(3, FORWARD, boundaries, run_id=5, **{"coding": "zstd", **options})


def values(seed: int = 0) -> torch.Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    x[:, 0, 0] = 30.0  # one outlier per row: most codes are near zero
    return x


def test_a_coded_message_is_shorter_and_gives_the_same_values() -> None:
    sender, receiver = (message_codec() for _ in range(2))
    plain = message_codec(coding="none")
    message = sender.encode(0, values(), IDS)
    uncoded = plain.encode(1, values(), IDS)
    found = receiver.decode(0, message, IDS, SHAPE)
    assert torch.equal(found, plain.decode(1, uncoded, IDS, SHAPE))
    assert len(message) < 0.6 * len(uncoded)


def test_a_payload_that_cannot_be_shortened_is_sent_as_it_is() -> None:
    full = Uniform(8, 64)
    sender, receiver = message_codec(full), message_codec(full)
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) - 0.5
    message = sender.encode(0, x, IDS)
    assert receiver.decode(0, message, IDS, SHAPE).sub(x).abs().max() < 0.01
    assert len(message) == HEADER_NBYTES + 4 * full.capacity(32 * 64)


def test_plain_evaluation_is_not_coded() -> None:
    ends = message_codec()
    ends.begin_pass(step=0, mode="eval")
    message = ends.encode(0, torch.zeros(SHAPE), IDS)
    assert torch.equal(ends.decode(0, message, IDS, SHAPE), torch.zeros(SHAPE))
    assert len(message) == HEADER_NBYTES + 4 * SHAPE.numel()


def test_an_end_that_does_not_code_rejects_coded_messages() -> None:
    message = message_codec().encode(0, values(), IDS)
    with pytest.raises(DesyncError, match="coding: peer sent 1, expected 0"):
        message_codec(coding="none").decode(0, message, IDS, SHAPE)


def test_a_damaged_coded_payload_is_found() -> None:
    message = message_codec().encode(0, values(), IDS)
    message[HEADER_NBYTES + 9] ^= 1
    with pytest.raises(DesyncError, match="checksum differs"):
        message_codec().decode(0, message, IDS, SHAPE)


@pytest.mark.dist
def test_a_coded_run_trains(ranks: Ranks) -> None:
    coded = {"bits": 4, "rate": 1.0, "coding": "zstd"}
    boundary = {"forward": {"kind": "aqsgd", **coded}, "backward": {"kind": "direct", **coded}}
    run = config(
        pipeline={"schedule": "Interleaved1F1B", "cuts": [1, 2, 3]},
        boundary=[boundary],
        train={"lr": 0.01},
    )
    batches = [batch(list(range(8)))] * 6
    exact, _ = single_process(run, batches)
    for losses, _, _ in ranks(run.world_size, train_steps, run, batches):
        assert losses[0] - losses[-1] > 0.9 * (exact[0] - exact[-1])
