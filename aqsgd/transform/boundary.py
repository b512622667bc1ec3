"""AQ-SGD in a learned transform: entropy-coded changes of whole-number coefficients.

A token a is sent in a basis V and steps of size s (`basis.py`), against what both ends cache of
the sample, the whole numbers Q, as far as it counts (`tokens.py`):

    q = round(V'a / s) - Q;   Q += q;   the receiver computes V (s Q)

V is the Karhunen-Loeve transform of what the sender has sent (`basis_search.py`); steps are its
choice too, message by message (`steps.py`) and token by token. Samples without history have Q = 0,
and models of their own. The ends need to agree on whole numbers only, so that their floating-point
products may differ.

Payload: `_HEAD` (version of the basis; a piece of the next one: index, of how many, bytes; the two
steps; bytes of first visits), the piece, a byte per sample (0: not finite, nothing is coded), then
first visits and changes: bytes of choices (u32), choices, and coefficients (`coefficients.py`).

Axes: B samples, T tokens, D channels, N tokens of several samples, K dimensions.
"""

import logging
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.memory import SampleMemory
from thinpipe.aqsgd.transform import coefficients
from thinpipe.aqsgd.transform.basis import rescaled, step_sizes
from thinpipe.aqsgd.transform.basis_search import sampled
from thinpipe.aqsgd.transform.coefficients import LARGEST, Coded, as_bytes
from thinpipe.aqsgd.transform.learned import CHANGE, FIRST, KINDS, Kind, Learned
from thinpipe.aqsgd.transform.proposal import proposal_capacity
from thinpipe.aqsgd.transform.proposals import PIECE_NBYTES, Piece, Proposals
from thinpipe.aqsgd.transform.rows import Rows, StoredSample
from thinpipe.aqsgd.transform.steps import STEP_RANGE, Steps
from thinpipe.aqsgd.transform.tokens import (
    COARSEST,
    NEUTRAL,
    SHARES,
    Choice,
    best_shares,
    coarseness,
    usual,
)
from thinpipe.aqsgd.transform.weights import TokenWeights
from thinpipe.pipeline.comm.boundary import GradientSink, MessagePlan
from thinpipe.pipeline.comm.error_stats import ErrorMeter
from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.header import crc32

_log = logging.getLogger(__name__)

_HEAD = struct.Struct("<IHHIhhI")
_LENGTH = struct.Struct("<I")


class _Part(NamedTuple):
    """The samples of a message that are coded alike, and what is cached of each.

    Numbers are in the current basis, and in steps of each token's own.
    """

    kind: Kind
    rows: list[int]
    held: list[StoredSample]

    def at(self, step_N: Tensor, choice: Choice, dimensions: int) -> Tensor:
        """What counts of what is cached (int32 [N, K]), in these steps; nothing of first visits."""
        if self.kind == FIRST or not self.rows:
            return torch.zeros(len(step_N), dimensions, dtype=torch.int32)
        q_NK = torch.cat([held.q_TK for held in self.held])
        found_NK = rescaled(q_NK, torch.cat([held.steps for held in self.held]), step_N)
        return choice.counted(found_NK.clamp_(-LARGEST, LARGEST))

    def values(self) -> Tensor:
        """Of known samples (fp32 [N, K])."""
        return torch.cat([_scaled(held.q_TK, held.steps) for held in self.held])


class _Seen(NamedTuple):
    """Tokens that the sender looks at, also in coefficients: what is to be sent, and values.

    Values have what the basis leaves out; what is to be sent has not. `number_N` are the tokens'
    among those of the part.
    """

    number_N: Tensor
    change_ND: Tensor
    change_NK: Tensor
    value_ND: Tensor
    value_NK: Tensor

    def only(self, which_N: Tensor) -> "_Seen":
        return _Seen(*(x[which_N] for x in self))


class _Sent(NamedTuple):
    """A part as it was coded, in steps of index `step` or coarser."""

    part: _Part
    step: int
    choice: Choice
    total_NK: Tensor
    """What is decoded, in steps."""
    coded: Coded
    seen: _Seen | None = None

    @property
    def steps(self) -> Tensor:
        return self.step + 2 * self.choice.coarse_N


class TransformBoundary:
    """One end of one direction of a cut. Without a cache every visit is a first one."""

    codec_id = 33  # in headers; docs/wire_format.md lists all
    bits = 4
    """In headers and where fidelities are compared; what is sent takes as many as it needs."""

    def __init__(self, learned: Learned, memory: SampleMemory, steps: Steps, share: float) -> None:
        """`memory` holds rows of `rows.row_nbytes`; `share` of the directions is sent."""
        self.memory, self.learned = memory, learned
        self._rows = Rows(memory, learned) if memory.caches else None
        self.error_meter = ErrorMeter()
        self._width, self._steps = learned.width, steps
        self._proposals = Proposals(learned.width, share)
        self.weights = TokenWeights()

    @property
    def take_gradients(self) -> GradientSink:
        return self.weights.take

    def capacity(self, shape_BTD: torch.Size) -> int:
        """With a piece of a basis, and 32 bits per value."""
        values = coefficients.capacity(shape_BTD[:-1].numel(), self._width)
        piece = min(PIECE_NBYTES, proposal_capacity(self._width))
        choices = 2 * _LENGTH.size + 2 * rans.capacity(shape_BTD[:-1].numel())
        return _HEAD.size + piece + shape_BTD[0] + coefficients.capacity(0, 0) + choices + values

    def plan(self, ids_B: Tensor, shape_BTD: torch.Size, *, step: int) -> MessagePlan:
        """Lengths depend on values; the checksum stands for all that both ends have learned."""
        prints_B = self.memory.fingerprints(ids_B)
        checksum = crc32(torch.cat([prints_B, torch.tensor([self.learned.digest()])]))
        nbytes = self.capacity(shape_BTD)
        return MessagePlan(ids_B, shape_BTD, step, nbytes, prints_B != 0, checksum, exact=False)

    def encode(self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor) -> int:
        piece = self._proposals.next_piece(self.learned)
        used, sent = self.write(plan, x_BTD, wire, piece)
        for done in sent:
            self._observe(done, x_BTD)
        self.error_meter.spectrum = self._proposals.spectrum
        self._keep(plan, sent, piece)
        return used

    def decode(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> None:
        sent, piece = self.read(plan, wire, out_BTD)
        self._keep(plan, sent, piece)

    def write(
        self, plan: MessagePlan, x_BTD: Tensor, wire: Tensor, piece: Piece
    ) -> tuple[int, list[_Sent]]:
        """Fill `wire` as far as needed; the bytes used, and what they stand for."""
        x_BTD = x_BTD.detach()
        finite_B = torch.isfinite(x_BTD).flatten(1).all(1).cpu()
        sent, blocks = [], []
        for kind in KINDS:
            part = self._part(plan, kind, finite_B)
            done, block = self._write_part(plan, part, x_BTD)
            sent.append(done)
            blocks.append(block)
        steps = [done.step for done in sent]
        numbers = (self.learned.version, piece.place, piece.of, len(piece.data), *steps)
        head = _HEAD.pack(*numbers, blocks[0].numel()) + piece.data
        parts = [as_bytes(head), finite_B.to(torch.uint8), *blocks]
        used = sum(part.numel() for part in parts)
        torch.cat(parts, out=wire[:used])
        return used, sent

    def read(self, plan: MessagePlan, wire: Tensor, out_BTD: Tensor) -> tuple[list[_Sent], Piece]:
        samples, tokens = plan.shape_BTD[:2]
        steps, piece, finite_B, blocks = self._split(wire, samples)
        out_BTD[~finite_B.to(out_BTD.device)] = torch.nan  # the fault must show at this end, too
        sent = []
        for kind, step, block in zip(KINDS, steps, blocks, strict=True):
            part = self._part(plan, kind, finite_B)
            model_K, scales = self.learned.model_MK[kind], self.learned.scales[kind]
            choice, block = self._read_choice(kind, block, len(part.rows) * tokens)
            coded = coefficients.decode(block, len(part.rows) * tokens, model_K, scales)
            step_N = step + 2 * choice.coarse_N
            held_NK = part.at(step_N, choice, model_K.numel())
            done = _Sent(part, step, choice, held_NK + coded.q_NK, coded)
            value_ND = self._restored(step_N, done.total_NK, out_BTD.device)
            out_BTD[part.rows] = value_ND.view(-1, *plan.shape_BTD[1:]).to(out_BTD.dtype)
            sent.append(done)
        return sent, piece

    def finish_step(self, *, keep: bool) -> None:
        if self._rows is not None:
            self._rows.finish_step(keep=keep)
        if keep:
            before = self.learned.version
            self.learned.commit()
            if self._rows is not None and self.learned.version != before:
                self._rows.recount()
            self.learned.drop_bases(() if self._rows is None else self._rows.versions)
        else:
            self.learned.discard()
        self.weights.finish_step(keep=keep)
        self._proposals.finish_step(self.learned, keep=keep)

    def state_dict(self) -> dict[str, Any]:
        memory = {} if self._rows is None else self._rows.state_dict()
        return memory | {
            "learned": self.learned.state_dict(),
            "proposals": self._proposals.state_dict(),
            "weights": self.weights.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "weights" not in state:
            _log.warning("transform: what an earlier version cached is not read; all starts anew")
            return
        if self._rows is not None:
            self._rows.load_state_dict(state)
        self.learned.load_state_dict(state["learned"])
        self._proposals.load_state_dict(state["proposals"])
        self.weights.load_state_dict(state["weights"])

    def _write_part(self, plan: MessagePlan, part: _Part, x_BTD: Tensor) -> tuple[_Sent, Tensor]:
        x_ND = x_BTD[part.rows].flatten(0, 1)
        y_NK = self.learned.basis.project(x_ND).cpu()
        seen, step = None, 0
        choice = Choice(*torch.zeros(2, len(y_NK), dtype=torch.int64))
        if part.rows:
            step, choice, seen = self._choose(part, plan, x_ND, y_NK)
        step_N = step + 2 * choice.coarse_N
        held_NK = part.at(step_N, choice, y_NK.shape[1])
        wanted_NK = (y_NK / step_sizes(step_N).float()[:, None]).round_()
        wanted_NK = wanted_NK.clamp_(-LARGEST, LARGEST).int()
        q_NK = wanted_NK - held_NK
        block = torch.empty(coefficients.capacity(*q_NK.shape), dtype=torch.uint8)
        model_K = self.learned.model_MK[part.kind]
        scales = self.learned.scales[part.kind]
        used, coded = coefficients.encode(q_NK, model_K, scales, block)
        done = _Sent(part, step, choice, held_NK + coded.q_NK, coded, seen)
        choices = coefficients.coded(choice.symbols, None, self.learned.choices[part.kind])
        return done, torch.cat([as_bytes(_LENGTH.pack(choices.numel())), choices, block[:used]])

    def _choose(
        self, part: _Part, plan: MessagePlan, x_ND: Tensor, y_NK: Tensor
    ) -> tuple[int, Choice, _Seen]:
        """The step, what differs from token to token, and what the sender looks at."""
        some = sampled(y_NK)
        share_N, change_NK = torch.zeros(len(y_NK), dtype=torch.int64), y_NK
        if part.kind == CHANGE:
            held_NK = part.values()
            share_N = best_shares(y_NK, held_NK)
            change_NK = y_NK - held_NK * (SHARES[share_N] / 4)[:, None]
        weight_N = self.weights.octaves(plan.ids_B[part.rows].tolist(), plan.shape_BTD[1])
        choice = Choice(coarseness(y_NK, weight_N), share_N)
        value_ND = x_ND[some.to(x_ND.device)].float().cpu()
        value_NK, change_NK = y_NK[some], change_NK[some]
        seen = _Seen(some, self.learned.basis.restore(change_NK), change_NK, value_ND, value_NK)
        step = self._steps.choose(part.kind == CHANGE, *seen.only(usual(value_NK))[1:])
        step -= 0 if weight_N is None else 2 * NEUTRAL  # `coarseness` raises all tokens by as much
        return _fitting(step, choice, y_NK), choice, seen

    def _read_choice(self, kind: Kind, block: Tensor, tokens: int) -> tuple[Choice, Tensor]:
        if block.numel() < _LENGTH.size:
            raise CodingError(f"{block.numel()} bytes of coefficients: too few for their choices")
        (used,) = _LENGTH.unpack(block[: _LENGTH.size].numpy().tobytes())
        if used > block.numel() - _LENGTH.size:
            raise CodingError(f"{used} bytes of choices among {block.numel()}")
        coded, rest = block[_LENGTH.size :].tensor_split([used])
        symbol_N = torch.empty(tokens, dtype=torch.uint8)
        rans.decode(coded, None, self.learned.choices[kind], symbol_N)
        return Choice.of(symbol_N), rest

    def _split(
        self, wire: Tensor, samples: int
    ) -> tuple[tuple[int, int], Piece, Tensor, tuple[Tensor, ...]]:
        """Steps, piece of a basis, which samples are finite, and the blocks."""
        if wire.numel() < _HEAD.size + samples:
            raise CodingError(f"a payload of {wire.numel()} bytes for {samples} samples")
        head = _HEAD.unpack(wire[: _HEAD.size].numpy().tobytes())
        version, index, of, nbytes, first_step, change_step, first = head
        rest = wire[_HEAD.size :]
        if version != self.learned.version or nbytes + samples + first > rest.numel():
            raise CodingError(
                f"a payload of {wire.numel()} bytes in basis {version}, with parts of {nbytes}, "
                f"{samples} and {first} bytes; expected basis {self.learned.version}"
            )
        if max(abs(first_step), abs(change_step)) > STEP_RANGE:
            raise CodingError(f"steps {first_step} and {change_step}: not within {STEP_RANGE}")
        most = -(-proposal_capacity(self._width) // PIECE_NBYTES)
        if nbytes and not (index < of <= most and nbytes <= PIECE_NBYTES):
            raise CodingError(
                f"piece {index} of {of} of a basis, {nbytes} bytes; there are at most {most}, of "
                f"{PIECE_NBYTES} bytes"
            )
        piece = Piece(index, of, rest[:nbytes].numpy().tobytes())
        finite_B = rest[nbytes : nbytes + samples] != 0
        blocks = rest[nbytes + samples :].tensor_split([first])
        return (first_step, change_step), piece, finite_B, blocks

    def _part(self, plan: MessagePlan, kind: Kind, finite_B: Tensor) -> _Part:
        assert plan.known_B is not None
        chosen_B = finite_B & (plan.known_B == (kind == CHANGE))
        rows = torch.nonzero(chosen_B).flatten().tolist()
        held = []
        if kind == CHANGE and self._rows is not None:
            ids, tokens = plan.ids_B[rows].tolist(), plan.shape_BTD[1]
            held = [self._rows.held(sample, tokens) for sample in ids]
        return _Part(kind, rows, held)

    def _restored(self, step_N: Tensor, q_NK: Tensor, device: torch.device) -> Tensor:
        return self.learned.basis.restore(_scaled(q_NK, step_N).to(device))

    def _keep(self, plan: MessagePlan, sent: Sequence[_Sent], piece: Piece) -> None:
        if piece.data:
            self.learned.take_piece(*piece)
        tokens, version = plan.shape_BTD[1], self.learned.version
        for done in sent:
            self.learned.count(done.part.kind, done.coded, done.choice.symbols)
            if self._rows is None:
                continue
            total_BTK = done.total_NK.view(-1, tokens, done.total_NK.shape[1])
            coarse_BT = done.choice.coarse_N.view(-1, tokens)
            for row, coarse_T, q_TK in zip(done.part.rows, coarse_BT, total_BTK, strict=True):
                held = StoredSample(version, done.step, coarse_T, q_TK)
                self._rows.stage(int(plan.ids_B[row]), held)

    def _observe(self, sent: _Sent, x_BTD: Tensor) -> None:
        rows, kind = sent.part.rows, sent.part.kind
        known = kind == CHANGE
        self.error_meter.count(known=len(rows) * known, first_visits=len(rows) * (not known))
        if sent.seen is None:
            return
        tokens, (some, change_ND, _, value_ND, _) = x_BTD.shape[1], sent.seen
        size_N1 = step_sizes(sent.steps[some]).float()[:, None]
        self._proposals.see(kind, change_ND / size_N1, value_ND / size_N1, of=len(rows) * tokens)
        if self.error_meter.wants(known=known):
            total_TK = sent.total_NK[:tokens]
            decoded_TD, old_TD = (
                self._restored(sent.steps[:tokens], q_TK, x_BTD.device)
                for q_TK in (total_TK, total_TK - sent.coded.q_NK[:tokens])
            )
            self.error_meter.measure(x_BTD[rows[0]], decoded_TD, old_TD if known else None)


def _fitting(step: int, choice: Choice, y_NK: Tensor) -> int:
    """The step, or the finest in which every coefficient fits: what is clamped would stay behind.

    A sample that did not change at all asks for no step, and a massive value for a coarse one.
    """
    largest = float((y_NK.abs() / step_sizes(2 * choice.coarse_N).float()[:, None]).max())
    finest = math.ceil(4 * math.log2(largest / LARGEST)) if 0 < largest < math.inf else step
    return min(max(step, finest), STEP_RANGE - 2 * COARSEST)


def _scaled(q_NK: Tensor, step_N: Tensor) -> Tensor:
    return q_NK.float() * step_sizes(step_N).float()[:, None]
