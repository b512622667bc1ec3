"""Messages whose payloads are entropy-coded: the same values in fewer bytes, still checked."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.training import batch, config, single_process, train_steps
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.pipeline.comm.boundary import Stateless, raw
from thinpipe.pipeline.comm.gloo_link import GlooLink
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.coding.entropy import Coding
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


@pytest.mark.parametrize("coding", ["zstd", "rans"])
def test_a_coded_message_is_shorter_and_gives_the_same_values(coding: str) -> None:
    sender, receiver = (message_codec(coding=coding) for _ in range(2))
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


@pytest.mark.parametrize(
    ("coding", "number", "other"), [("zstd", 1, "none"), ("rans", 2, "none"), ("rans", 2, "zstd")]
)
def test_an_end_that_does_not_code_rejects_coded_messages(
    coding: str, number: int, other: str
) -> None:
    message = message_codec(coding=coding).encode(0, values(), IDS)
    with pytest.raises(DesyncError, match=f"coding: peer sent {number}, expected 0"):
        message_codec(coding=other).decode(0, message, IDS, SHAPE)


@pytest.mark.parametrize("coding", ["zstd", "rans"])
def test_a_damaged_coded_payload_is_found(coding: str) -> None:
    message = message_codec(coding=coding).encode(0, values(), IDS)
    message[HEADER_NBYTES + 9] ^= 1
    with pytest.raises(DesyncError, match="checksum differs"):
        message_codec(coding=coding).decode(0, message, IDS, SHAPE)


def _visits(rank: int, coding: Coding) -> tuple[int, str]:
    """Four visits of the same samples; returns bytes sent and the memory's digest."""
    assert dist.group.WORLD is not None
    link = GlooLink(dist.group.WORLD, peer=1 - rank, channel=1, name="edge")
    boundary, sent = build_delta(AqsgdConfig(bits=2, memory=4), width=64, key=3), 0
    ends = MessageCodec(3, FORWARD, {"train": boundary}, run_id=5, coding=coding)
    for step in range(4):
        link.begin_pass(step)
        ends.begin_pass(step=step, mode="train")
        if rank == 0:
            message = ends.encode(0, values(step), IDS)
            link.send(0, message)
            sent += len(message)
        else:
            link.expect(0, ends.capacity(SHAPE))
            assert torch.isfinite(ends.decode(0, link.take(0), IDS, SHAPE)).all()
        ends.finish_step(keep=True)
    link.begin_pass(4)
    return sent, boundary.memory.digest()


@pytest.mark.dist
@pytest.mark.parametrize("coding", ["zstd", "rans"])
def test_shorter_messages_arrive_over_gloo_and_memories_stay_equal(
    ranks: Ranks, coding: Coding
) -> None:
    (sent, digest), (_, other) = ranks(2, _visits, coding)
    assert digest == other
    uncoded = 4 * (HEADER_NBYTES + SHAPE.numel() // 4 + 4 * 32 * 2) + 3 * SHAPE.numel() // 4
    assert 0 < sent < uncoded


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_coded_run_trains(ranks: Ranks, schedule: str) -> None:
    coded = {"bits": 4, "rate": 1.0, "coding": "rans"}
    boundary = {"forward": {"kind": "aqsgd", **coded}, "backward": {"kind": "direct", **coded}}
    run = config(
        pipeline={"schedule": schedule, "cuts": [1, 2, 3]},
        boundary=[boundary],
        train={"lr": 0.01},
    )
    batches = [batch(list(range(8)))] * 6
    exact, _ = single_process(run, batches)
    for losses, _, _ in ranks(run.world_size, train_steps, run, batches):
        assert losses[0] - losses[-1] > 0.9 * (exact[0] - exact[-1])
