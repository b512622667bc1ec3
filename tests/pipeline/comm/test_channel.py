"""Codecs overlap with compute, not far ahead of it; an error there ends the step at once."""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.single_process import LoopbackLink
from tests.ranks import run_ranks
from tests.training import TORCH_2_13, batch, config, start
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.components import Built
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.boundary import MessagePlan, Stateless
from thinpipe.pipeline.comm.channel import IncomingChannel, Microbatch, OutgoingChannel, Pass
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.schedule import CompressedStage
from thinpipe.pipeline.stage import Channels
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.header import HEADER_NBYTES
from thinpipe.pipeline.wire.told import BACKWARD, ComputeEvent

pytestmark = pytest.mark.dist
COUNT = 6
Happens = Callable[[str, int], None]
"""Told of "encode" and "decode" when they begin, "decoded" and "forward" when they end: of which
microbatch, if samples are numbered like them."""


@dataclass(frozen=True)
class Told(Stateless):
    """A codec that says what it does."""

    happens: Happens = lambda what, microbatch: None

    def encode(self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor) -> int:
        self.happens("encode", int(plan.ids_B[0]))
        return super().encode(plan, x_BTD, wire)

    def decode(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> None:
        self.happens("decode", int(plan.ids_B[0]))
        super().decode(plan, wire, out_BTD)
        self.happens("decoded", int(plan.ids_B[0]))


def told_run(happens: Happens, *, schedule: str = "GPipe") -> Built:
    """Two ranks, a sample per microbatch."""
    built = start(
        config(
            pipeline={"cuts": [2], "microbatches": COUNT, "schedule": schedule},
            train={"batch_size": COUNT},
        )
    )
    (stage,) = built.stages
    for channel in stage.channels.all():
        channel.codec.boundaries = {"train": Told(Cast("fp32"), happens=happens)}
    module: Any = stage.submod
    calls = itertools.count()
    module.register_forward_hook(lambda *_: happens("forward", next(calls)))
    return built


def events_of(rank: int, schedule: str) -> list[ComputeEvent]:
    """The first message is encoded until a forward after it ends; a forward ends after a decode."""
    forward, decode = threading.Event(), threading.Event()

    def happens(what: str, microbatch: int) -> None:
        if (what, microbatch) == ("forward", rank ^ 1):
            forward.set()
        if (what, microbatch) == ("decode", 1):
            decode.set()
        if rank == 0 and (what, microbatch) == ("encode", 0):
            assert forward.wait(PATIENCE_S)
        if rank == 1 and (what, microbatch) == ("forward", 0):
            assert decode.wait(PATIENCE_S)

    built = told_run(happens, schedule=schedule)
    built.engine.train_step(batch(list(range(COUNT))), 0)
    return built.engine.take_events()


def spans(events: list[ComputeEvent], kind: str) -> dict[int, ComputeEvent]:
    return {event.microbatch: event for event in events if event.kind == kind}


def all_at_once(rank: int) -> dict[str, Any]:
    return {
        "events": {schedule: events_of(rank, schedule) for schedule in ("GPipe", "Deep1F1B")},
        "decoded": decoded_at_each_forward(rank),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, all_at_once)


@pytest.mark.parametrize("schedule", ["GPipe", "Deep1F1B"])
def test_messages_are_coded_while_the_stage_computes(
    found: list[dict[str, Any]], schedule: str
) -> None:
    upper, lower = (one["events"][schedule] for one in found)
    forwards, encodes = spans(upper, "F"), spans(upper, "encode")
    assert encodes[0].end_s > forwards[1].start_s
    assert encodes[0].start_s >= forwards[0].end_s
    forwards, decodes = spans(lower, "F"), spans(lower, "decode")
    assert decodes[1].start_s < forwards[0].end_s
    for m in range(COUNT):
        assert decodes[m].end_s <= forwards[m].start_s
        wait = spans(lower, "wait")[m]
        assert wait.end_s <= forwards[m].start_s
    for events in (upper, lower):
        compute = sorted((e.start_s, e.end_s) for e in events if e.kind in "FB" or e.kind == "wait")
        for (_, end_s), (start_s, _) in pairwise(compute):
            assert end_s <= start_s + 1e-4, "the schedule's thread does one thing at a time"


def decoded_at_each_forward(rank: int) -> list[int]:
    """On the lower stage: how many microbatches were decoded when each forward ended.

    A forward ends when those that may be have been, and whatever else the channel was given.
    """
    decoded, found = [0], list[int]()

    def happens(what: str, microbatch: int) -> None:
        if what == "decoded":
            decoded[0] += 1
        elif what == "forward" and rank == 1:
            until(lambda: decoded[0] >= min(microbatch + 3, COUNT))
            work_off(built.stages[0].channels.activations_in)
            found.append(decoded[0])

    built = told_run(happens)
    built.engine.train_step(batch(list(range(COUNT))), 0)
    return found


def work_off(channel: IncomingChannel | None) -> None:
    """Wait until a channel's thread has done what it was given."""
    assert channel is not None
    channel._worker.submit(lambda: None).result(PATIENCE_S)


def test_no_more_than_two_decoded_microbatches_wait_for_the_schedule(
    found: list[dict[str, Any]],
) -> None:
    assert found[1]["decoded"] == [min(m + 3, COUNT) for m in range(COUNT)]


@dataclass
class Kept(LoopbackLink):
    """Keeps what is sent, and which messages were waited for."""

    taken: list[int] = field(default_factory=list)

    def take(self, slot: int) -> Tensor:
        self.taken.append(slot)
        return super().take(slot)


def test_a_gradient_is_not_waited_for_before_the_schedule_is() -> None:
    """Until then every peer has reason to be silent, for longer than a link waits."""
    link, ids_B, x_BTD = Kept(), torch.tensor([0]), torch.ones(1, 3, 4)
    sender, receiver = (
        MessageCodec(1, BACKWARD, {"train": Told(Cast("fp32"))}, run_id=0) for _ in range(2)
    )
    channel, known = IncomingChannel(receiver, link), [Microbatch(x_BTD.shape, Samples(ids_B))]
    channel.begin_pass(Pass(0, 0, "train", known, FirstError()), lambda *_: None, [0])
    work_off(channel)
    assert link.taken == []
    sender.begin_pass(step=0, mode="train")
    link.send(0, sender.encode(0, x_BTD, ids_B))
    assert torch.equal(channel.receive(0), x_BTD)
    assert link.taken == [0]


def fail_to_encode(rank: int, accounts: Path) -> None:
    """Rank 0 cannot encode what rank 1 needs before it sends what rank 0 is waiting for."""

    def happens(what: str, microbatch: int) -> None:
        if rank == 0 and (what, microbatch) == ("encode", 3):
            raise ValueError("sample 3 cannot be coded")

    built = told_run(happens)
    begin_s = time.monotonic()
    try:
        built.engine.train_step(batch(list(range(COUNT))), 0)
    except (ValueError, TransportError) as error:
        (accounts / str(rank)).write_text(f"{time.monotonic() - begin_s} {error}")
    os._exit(9)


def test_what_cannot_be_encoded_ends_a_step_that_waits_for_something_else(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0: ended without a result"):
        run_ranks(2, fail_to_encode, tmp_path)
    seconds, reported = (tmp_path / "0").read_text(encoding="utf-8").split(" ", 1)
    assert "sample 3 cannot be coded" in reported
    assert float(seconds) < 60, "it waited for the peer's timeout"
    # of which one depends on what came through before the process ended, and its sockets with it
    assert "forward: lost while waiting for microbatch " in (tmp_path / "1").read_text(
        encoding="utf-8"
    )


class WithOffset(nn.Module):
    """Its parameter's gradient is that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1, 3, 4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (x_BTD + self.offset).square()


def split_backward(rank: int) -> tuple[Tensor, Tensor]:
    """Gradients of two inputs, and those that were sent for them."""
    link, shape = Kept(), torch.Size((1, 3, 4))
    codec = MessageCodec(1, BACKWARD, {"train": Told(Cast("fp32"))}, run_id=0)
    channels = Channels(gradients_out=OutgoingChannel(codec, link))
    stage = CompressedStage(WithOffset(), 1, 3, channels=channels, group=dist.group.WORLD)
    stage.has_backward = True
    known = [Microbatch(shape, Samples(torch.tensor([m]))) for m in (0, 1)]
    stage.begin_pass(Pass(0, 0, "train", known, FirstError()))
    stage._prepare_forward_infra(2, ())
    gradients = []
    for m in (0, 1):
        x_BTD = torch.full(shape, m + 1.0)
        stage.set_local_fwd_input(x_BTD, m)
        stage.set_local_bwd_input((torch.ones(shape),), m)
        stage.forward_one_chunk(m, ())
        stage.backward_one_chunk(m, full_backward=False)
        gradients.append(stage.bwd_cache[m][0].clone())
        stage.get_bwd_send_ops(m)
        stage.backward_weight_one_chunk(m)
    stage.end_pass()
    for m in (0, 1):
        link.expect(m, HEADER_NBYTES + 48)
    sent = [link.take(m)[HEADER_NBYTES:].view(torch.float32).view(shape) for m in (0, 1)]
    return torch.stack(gradients), torch.stack(sent)


@TORCH_2_13
def test_a_gradient_that_a_parameter_shares_is_sent_as_it_was() -> None:
    ((gradients, sent),) = run_ranks(1, split_backward)
    assert torch.equal(gradients[0], torch.full((1, 3, 4), 2.0))
    assert torch.equal(sent, gradients)


COMPUTE_FAILS = """
import sys
from datetime import timedelta
import torch.distributed as dist
from tests.pipeline.comm.test_channel import told_run
from tests.training import batch
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
built = told_run(lambda what, microbatch: None)
dist.barrier()
calls = []
def hook(*_):
    calls.append(0)
    if rank == 1:  # its channel waits for the second microbatch, which rank 0 never sends
        raise ArithmeticError("compute failed")
    if len(calls) == 2:
        sys.stdin.read()
built.stages[0].submod.register_forward_pre_hook(hook)
built.engine.train_step(batch(list(range(6))), 0)
"""


@pytest.mark.slow
def test_waiting_channels_do_not_keep_a_failed_rank_from_ending(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    root = str(Path(__file__).parents[3])
    upper, lower = (
        subprocess.Popen(
            [sys.executable, "-c", COMPUTE_FAILS, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment,
        )
        for rank in (0, 1)
    )
    try:
        _, reported = lower.communicate(timeout=200)
    finally:
        for process in (upper, lower):
            process.kill()
            process.communicate()
    assert lower.returncode == 1, reported
    assert "compute failed" in reported


def test_the_first_error_ends_every_wait_but_for_what_is_done() -> None:
    first_error = FirstError()
    silent, failing, other, done = (first_error.watch(Future[int]()) for _ in range(4))
    first_error.check()
    done.set_result(7)
    failing.set_exception(TransportError("first"))
    other.set_exception(TransportError("second"))
    for wait in (first_error.check, lambda: first_error.wait_for(silent)):
        with pytest.raises(TransportError, match="first"):
            wait()
    with pytest.raises(TransportError, match="second"):
        first_error.wait_for(other)
    assert first_error.wait_for(done) == 7
