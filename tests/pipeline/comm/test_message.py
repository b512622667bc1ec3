"""A message of a cut: which boundary makes it, and how long it is."""

from typing import Any

import torch

from thinpipe.pipeline.comm.boundary import Stateless, raw
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.wire.header import HEADER_NBYTES
from thinpipe.pipeline.wire.told import FORWARD
from thinpipe.pipeline.wire.uniform import Uniform

SHAPE = torch.Size((4, 32, 64))
IDS = torch.tensor([4, 9, 2, 7])


def test_plain_evaluation_sends_values_as_they_are() -> None:
    codec = Uniform(4, 64)
    boundaries: Any = {"train": Stateless(codec), "eval": raw()}
    sender, receiver = (MessageCodec(3, FORWARD, boundaries, run_id=5) for _ in range(2))
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    trained = sender.encode(0, x, IDS)
    assert len(trained) == HEADER_NBYTES + 4 * codec.capacity(32 * 64)
    assert not torch.equal(receiver.decode(0, trained, IDS, SHAPE), x)
    for end in (sender, receiver):
        end.begin_pass(step=0, mode="eval")
    evaluated = sender.encode(0, x, IDS)
    assert len(evaluated) == HEADER_NBYTES + 4 * SHAPE.numel()
    assert torch.equal(receiver.decode(0, evaluated, IDS, SHAPE), x)
