"""AQ-SGD: send the quantized change of a sample's activation since its last visit.

Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
Guarantees", NeurIPS 2022 (arXiv 2206.01299), Algorithm 1. Symbols: a(x) -> x_BTD, m(x) ->
memory_BN, Q -> delta codec, d = Q(a - m). First visits go through a codec of their own (the paper:
full precision; by default 6 bits in tiles here). Both ends do m := m + d in fp32 from the same
bytes.

A payload is the rows of first visits, in order, then those of known samples, in order.

Axes: B samples, T tokens, D channels, N = T * D values of a sample, W bytes of a sample.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.coded_memory import CodedMemory, Visit
from thinpipe.pipeline.comm.boundary import MessagePlan
from thinpipe.pipeline.comm.error_stats import ErrorMeter
from thinpipe.pipeline.wire.codec import ChangeCodec, Codec, Noise
from thinpipe.pipeline.wire.header import crc32
from thinpipe.pipeline.wire.pinned import brought_to, written_on


class _Part(NamedTuple):
    """Some rows of a microbatch: which they are, their samples, and their bytes."""

    rows: list[int]
    ids_B: Tensor
    wire_BW: Tensor

    def one_by_one(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(row, id [1], bytes [1, W])."""
        # cached rows lie apart: a kernel per row reads and writes each of them in one pass
        for i, row in enumerate(self.rows):
            yield row, self.ids_B[i : i + 1], self.wire_BW[i : i + 1]


class DeltaBoundary:
    """One end of one direction of a cut under AQ-SGD.

    The sender's `encode` and the receiver's `decode` make the same change to their caches. The
    receiver computes with m + d, as in the paper, not with the stored (rounded) value.
    """

    codec_id = 32  # in headers; docs/wire_format.md lists all
    take_gradients = None

    def __init__(
        self, memory: CodedMemory, *, first_visit: Codec, delta: ChangeCodec, key: int
    ) -> None:
        """`key` addresses the random numbers of stochastic codecs; it is the same at both ends."""
        self.memory = memory
        self._first_visit, self._delta, self._key = first_visit, delta, key
        self.error_meter = ErrorMeter()

    @property
    def bits(self) -> int:
        return self._delta.bits

    def capacity(self, shape_BTD: torch.Size) -> int:
        """All of them first visits, or all known."""
        numel = shape_BTD[1:].numel()
        return shape_BTD[0] * max(self._first_visit.capacity(numel), self._delta.capacity(numel))

    def plan(self, ids_B: Tensor, shape_BTD: torch.Size, *, step: int) -> MessagePlan:
        """First visits at their codec's size, known samples at the delta codec's."""
        prints_B = self.memory.fingerprints(ids_B)
        known_B, numel = prints_B != 0, shape_BTD[1:].numel()
        known = int(known_B.sum())
        nbytes = (len(ids_B) - known) * self._first_visit.capacity(numel)
        nbytes += known * self._delta.capacity(numel)
        return MessagePlan(ids_B, shape_BTD, step, nbytes, known_B, crc32(prints_B))

    def encode(self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor) -> int:
        x_BN = x_BTD.detach().reshape(len(plan.ids_B), -1)
        with written_on(x_BN.device, wire) as near:
            first, known = self._parts(plan, near)
            seen_BN = self._encode_first(x_BN, first, plan)
            visits = [self._encode_change(x_BN, *row, plan) for row in known.one_by_one()]
        self.error_meter.count(known=len(known.rows), first_visits=len(first.rows))
        self._stage(plan, wire, seen_BN, visits)
        return plan.capacity

    def decode(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> None:
        out_BN = out_BTD.view(len(plan.ids_B), -1)
        first, known = self._parts(plan, brought_to(out_BN.device, wire))
        seen_BN = torch.empty(len(first.rows), out_BN.shape[1], device=out_BN.device)
        if first.rows:
            self._first_visit.decode(first.wire_BW, seen_BN)
            out_BN[first.rows] = seen_BN.to(out_BN.dtype)
        visits = [self._decode_change(out_BN, *row) for row in known.one_by_one()]
        self._stage(plan, wire, seen_BN, visits)

    def finish_step(self, *, keep: bool) -> None:
        if keep:
            self.memory.commit()
        else:
            self.memory.discard()

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state)

    def _encode_first(self, x_BN: Tensor, part: _Part, plan: MessagePlan) -> Tensor:
        """What the receiver will have seen of samples without history."""
        seen_BN = torch.empty(len(part.rows), x_BN.shape[1], device=x_BN.device)
        if part.rows:
            noise = Noise(self._key, plan.step, part.ids_B)
            self._first_visit.encode(x_BN[part.rows], part.wire_BW, seen_BN, noise=noise)
            if self.error_meter.wants(known=False):
                pair = x_BN[part.rows[0]], seen_BN[0]
                self.error_meter.measure(*(row.view(plan.shape_BTD[1:]) for row in pair))
        return seen_BN

    def _encode_change(
        self, x_BN: Tensor, row: int, id_1: Tensor, wire_1W: Tensor, plan: MessagePlan
    ) -> tuple[Visit, Tensor]:
        """An open visit, and whether its new row is finite."""
        x_1N = x_BN[row : row + 1]
        visit = self.memory.open(int(id_1), x_BN.shape[1], x_BN.device)
        noise = Noise(self._key, plan.step, id_1)
        finite_1 = self._delta.encode_change(x_1N, visit.cached, wire_1W, noise=noise)
        if self.error_meter.wants(known=True):
            rows = (x_1N, visit.cached.fresh_BN, visit.cached.old_BN)
            self.error_meter.measure(*(row_1N.view(plan.shape_BTD[1:]) for row_1N in rows))
        return visit, finite_1

    def _decode_change(
        self, out_BN: Tensor, row: int, id_1: Tensor, wire_1W: Tensor
    ) -> tuple[Visit, Tensor]:
        visit = self.memory.open(int(id_1), out_BN.shape[1], out_BN.device)
        out_1N = out_BN[row : row + 1]
        return visit, self._delta.decode_change(wire_1W, visit.cached, out_1N)

    def _stage(
        self, plan: MessagePlan, wire: Tensor, seen_BN: Tensor, visits: list[tuple[Visit, Tensor]]
    ) -> None:
        first, known = self._parts(plan, wire)
        if first.rows:
            self.memory.stage(first.ids_B, seen_BN, first.wire_BW)
        # a change to a NaN or inf stays one: such a row is dropped, and comes as a first visit
        finite = torch.cat([flag_1 for _, flag_1 in visits]).tolist() if visits else []
        for (visit, _), wire_W, keep in zip(visits, known.wire_BW, finite, strict=True):
            self.memory.close(visit, wire_W, keep=keep)

    def _parts(self, plan: MessagePlan, wire: Tensor) -> tuple[_Part, _Part]:
        """First visits and known samples; the bytes of the former come first."""
        assert plan.known_B is not None
        ids_B, numel = plan.ids_B, plan.shape_BTD[1:].numel()
        parts, start = [], 0
        for codec, rows_B in ((self._first_visit, ~plan.known_B), (self._delta, plan.known_B)):
            rows, width = torch.nonzero(rows_B).flatten().tolist(), codec.capacity(numel)
            end = start + len(rows) * width
            parts.append(_Part(rows, ids_B[rows], wire[start:end].view(len(rows), width)))
            start = end
        return parts[0], parts[1]
