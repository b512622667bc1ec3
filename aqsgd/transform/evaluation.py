"""How samples are coded in evaluation: as those without history, with what training has learned."""

import torch
from torch import Tensor

from thinpipe.aqsgd.transform.boundary import TransformBoundary
from thinpipe.aqsgd.transform.proposals import NO_PIECE
from thinpipe.pipeline.comm.boundary import LearnsNothing, MessagePlan
from thinpipe.pipeline.comm.error_stats import ErrorMeter


class FirstVisits(LearnsNothing):
    """A boundary as it codes samples without history, which learns nothing: for evaluation."""

    codec_id, bits = TransformBoundary.codec_id, TransformBoundary.bits

    def __init__(self, training: TransformBoundary) -> None:
        self._training = training
        self.error_meter = ErrorMeter()

    def capacity(self, shape_BTD: torch.Size) -> int:
        return self._training.capacity(shape_BTD)

    def plan(self, ids_B: Tensor, shape_BTD: torch.Size, *, step: int) -> MessagePlan:
        none_B = torch.zeros(len(ids_B), dtype=torch.bool)
        nbytes, checksum = self.capacity(shape_BTD), self._training.learned.digest()
        return MessagePlan(ids_B, shape_BTD, step, nbytes, none_B, checksum, exact=False)

    def encode(self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor) -> int:
        return self._training.write(plan, x_BTD, wire, NO_PIECE)[0]

    def decode(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> None:
        self._training.read(plan, wire, out_BTD)
