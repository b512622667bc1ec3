"""Channels whose payloads are entropy-coded: the same values in fewer bytes, still checked."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.training import batch, config, single_process, train_steps
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.pipeline.comm.boundary import Stateless, raw
from thinpipe.pipeline.comm.channel import FORWARD, Channel
from thinpipe.pipeline.comm.link import GroupLink, Link, LoopbackLink
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError
from thinpipe.pipeline.wire.uniform import Uniform

SHAPE = torch.Size((4, 32, 64))
IDS = torch.tensor([4, 9, 2, 7])
QUANTIZED = Uniform(4, "tensor")


def channel(link: Link, codec: Codec = QUANTIZED, **options: Any) -> Channel:
    boundaries: Any = {"train": Stateless(codec), "eval": raw()}
    made = Channel(3, FORWARD, link, boundaries, run_id=5, **{"coding": "zstd", **options})
    made.begin_pass(0, step=0, mode="train")
    return made


def values(seed: int = 0) -> torch.Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    x[:, 0, 0] = 30.0  # one outlier per row: most codes are near zero
    return x


def test_a_coded_message_is_shorter_and_gives_the_same_values() -> None:
    link = LoopbackLink()
    sender, receiver, plain = channel(link), channel(link), channel(link, coding="none")
    receiver.expect(0, SHAPE)
    sender.send(0, values(), IDS)
    found = receiver.receive(0, SHAPE, IDS)
    plain.expect(1, SHAPE)
    plain.send(1, values(), IDS)
    assert torch.equal(found, plain.receive(1, SHAPE, IDS))
    assert sender.sent.nbytes < 0.6 * plain.sent.nbytes


def test_a_payload_that_cannot_be_shortened_travels_as_it_is() -> None:
    link, full = LoopbackLink(), Uniform(8, "token", width=64)
    sender, receiver = channel(link, full), channel(link, full)
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) - 0.5
    receiver.expect(0, SHAPE)
    sender.send(0, x, IDS)
    assert receiver.receive(0, SHAPE, IDS).sub(x).abs().max() < 0.01
    assert sender.sent.nbytes == HEADER_NBYTES + 4 * full.capacity(32 * 64)


def test_plain_evaluation_is_not_coded() -> None:
    link = LoopbackLink()
    ends = channel(link)
    ends.begin_pass(1, step=0, mode="eval")
    ends.expect(0, SHAPE)
    ends.send(0, torch.zeros(SHAPE), IDS)
    assert torch.equal(ends.receive(0, SHAPE, IDS), torch.zeros(SHAPE))
    assert ends.sent.nbytes == HEADER_NBYTES + 4 * SHAPE.numel()


def test_an_end_that_does_not_code_says_so() -> None:
    link = LoopbackLink()
    sender, receiver = channel(link), channel(link, coding="none")
    receiver.expect(0, SHAPE)
    sender.send(0, values(), IDS)
    with pytest.raises(DesyncError, match="coding: peer sent 1, expected 0"):
        receiver.receive(0, SHAPE, IDS)


def test_a_damaged_coded_payload_is_found() -> None:
    link = LoopbackLink()
    sender, receiver = channel(link), channel(link)
    receiver.expect(0, SHAPE)
    sender.send(0, values(), IDS)
    link._messages[0][HEADER_NBYTES + 9] ^= 1
    with pytest.raises(DesyncError, match="checksum differs"):
        receiver.receive(0, SHAPE, IDS)


@pytest.mark.parametrize(("link_rate", "coded"), [(1e3, True), (float("inf"), False)])
def test_the_sender_decides_by_its_link_and_the_receiver_follows(
    link_rate: float, coded: bool
) -> None:
    link = LoopbackLink()
    sender = channel(link, coding="auto", link_rate=link_rate)
    receiver, sizes = channel(link, coding="auto"), []
    for microbatch in range(3):
        receiver.expect(microbatch, SHAPE)
        sender.send(microbatch, values(microbatch), IDS)
        assert torch.isfinite(receiver.receive(microbatch, SHAPE, IDS)).all()
        sizes.append(sender.take_traffic().nbytes)
    full = HEADER_NBYTES + 4 * QUANTIZED.capacity(32 * 64)
    assert (sizes[2] < 0.6 * full) == coded
    assert (sizes[2] == full) != coded


def _visits(rank: int) -> tuple[int, str]:
    """Four visits of the same samples; returns bytes sent and the memory's digest."""
    assert dist.group.WORLD is not None
    link = GroupLink(dist.group.WORLD, peer=1 - rank, channel=1, name="edge")
    boundary = build_delta(AqsgdConfig(bits=2, memory=4), width=64, key=3)
    ends = Channel(3, FORWARD, link, {"train": boundary}, run_id=5, coding="zstd")
    for step in range(4):
        ends.begin_pass(step, step=step, mode="train")
        if rank == 0:
            ends.send(0, values(step), IDS)
        else:
            ends.expect(0, SHAPE)
            assert torch.isfinite(ends.receive(0, SHAPE, IDS)).all()
        ends.finish_step(keep=True)
    link.begin_pass(4)
    return ends.sent.nbytes, boundary.memory.digest()


@pytest.mark.dist
def test_shorter_messages_arrive_over_gloo_and_memories_stay_equal(ranks: Ranks) -> None:
    (sent, digest), (_, other) = ranks(2, _visits)
    assert digest == other
    uncoded = 4 * (HEADER_NBYTES + SHAPE.numel() // 4 + 4 * 32 * 2) + 3 * SHAPE.numel() // 4
    assert 0 < sent < uncoded


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_run_measures_its_links_and_trains(ranks: Ranks, schedule: str) -> None:
    coded = {"bits": 4, "rate": 1.0, "coding": "auto"}
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
