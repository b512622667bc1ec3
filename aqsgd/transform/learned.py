"""What both ends of a direction learn alike from its messages: basis and models of coefficients.

Everything is whole numbers. A step's messages are coded with what was learned before it, in any
order; at its end both ends take in sums over them, or drop these with the step. A new basis comes
from the sender in pieces, one to a message, and is used from the step after its last piece.

Axes: N tokens, D channels, K dimensions, M = 2 kinds of visits, T scales of a token, C what the
sender chooses for it.
"""

import functools
import math
import struct
import zlib
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import logistic
from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.coefficients import SCALES, UNSCALED, Coded, as_bytes
from thinpipe.aqsgd.transform.proposal import Proposal
from thinpipe.aqsgd.transform.tokens import SYMBOLS
from thinpipe.pipeline.wire.coding.rans import PROBABILITY_BITS, Tables

Kind = Literal[0, 1]
FIRST: Kind = 0
CHANGE: Kind = 1
KINDS: tuple[Kind, Kind] = (FIRST, CHANGE)
"""Values of samples without history, and changes of known ones."""

_LARGEST_COUNTED = 2**15  # times weights up to 2^20 and 2^12: int64 holds sums over 2^16 tokens
_SAMPLED = 4  # every fourth token is counted for the models of dimensions
_START = (31, 19)
"""Models before anything is known, for steps of a tenth of a value and of a whole change."""


class Learned:
    """One end's copy."""

    def __init__(self, width: int) -> None:
        """Of tokens of `width` channels; the basis is that of the channels at first."""
        self.width = width
        self.reset()

    def reset(self) -> None:
        self.version = 0
        self._proposal: Proposal | None = None
        self.bases = {0: Basis.identity(self.width)}
        self.model_MK = torch.tensor(_START)[:, None].repeat(1, self.width)
        self._scales_MT = torch.zeros(2, SCALES, dtype=torch.int64)
        self._choices_MC = torch.zeros(2, SYMBOLS, dtype=torch.int64)
        self._pieces: dict[int, bytes] = {}
        self._turns: dict[int, Tensor] = {}
        self.discard()

    @property
    def basis(self) -> Basis:
        return self.bases[self.version]

    @property
    def received(self) -> int:
        """Pieces of the next basis that earlier steps brought."""
        return len(self._pieces)

    def turn_from(self, version: int) -> Tensor:
        """What turns coefficients under an older basis into those under the current one."""
        if version not in self._turns:
            self._turns[version] = self.basis.turn_from(self.bases[version])
        return self._turns[version]

    def take_piece(self, index: int, of: int, data: bytes) -> None:
        """Keep a piece of the next basis until the end of the step."""
        self._new_pieces[index] = data
        pieces = self._known_pieces()
        if len(pieces) == of:
            self._proposal = Proposal.unpacked(
                b"".join(pieces[index] for index in sorted(pieces)), self.width
            )

    def count(self, kind: Kind, coded: Coded, symbol_N: Tensor) -> None:
        """Take in a message's coefficients, and what was chosen, at the end of the step."""
        self._new_scales_MT[kind] += torch.bincount(coded.scale_N, minlength=SCALES)
        self._new_choices_MC[kind] += torch.bincount(symbol_N.long(), minlength=SYMBOLS)
        some_N, weight_T = coded.scale_N[::_SAMPLED], _alike()
        sampled_T1 = (torch.bincount(some_N, minlength=SCALES) * weight_T)[:, None]
        near = [(coded.model_TK + i).clamp_(0, logistic.MODELS - 1) for i in (-1, 0, 1)]
        sums = [(logistic.magnitudes()[model_TK] * sampled_T1).sum(0) for model_TK in near]
        size_NK = coded.q_NK[::_SAMPLED].abs().clamp_max(_LARGEST_COUNTED)
        found_K = (size_NK * weight_T[some_N, None]).sum(0)
        self._sums[kind] += torch.stack([found_K << logistic.MAGNITUDE_BITS, *sums])

    def adopt(self, proposal: Proposal) -> None:
        """Use a basis from the next step on; both ends do so between the same two steps."""
        self.model_MK = proposal.model_MK.clone()
        self.version += 1
        self.bases[self.version] = proposal.basis
        self._turns = {}
        self._pieces = {}
        self.discard()

    def commit(self) -> None:
        for kind in KINDS:
            found_K, below_K, here_K, above_K = self._sums[kind]
            # past halfway to the next model; in whole numbers, so that both ends decide alike
            rises_K = 2 * found_K > here_K + above_K
            falls_K = 2 * found_K < here_K + below_K
            self.model_MK[kind] += rises_K.long() - falls_K.long()
        self.model_MK.clamp_(0, logistic.MODELS - 1)
        self._scales_MT = _faded(self._scales_MT, self._new_scales_MT)
        self._choices_MC = _faded(self._choices_MC, self._new_choices_MC)
        self._pieces = self._known_pieces()
        if self._proposal is not None:
            self.adopt(self._proposal)
        else:
            self.discard()

    def drop_bases(self, held: Collection[int]) -> None:
        """Forget bases that neither messages nor samples of these versions need."""
        needed = {0, self.version, *held}
        self.bases = {version: self.bases[version] for version in self.bases if version in needed}
        self._turns = {
            version: self._turns[version] for version in self._turns if version in needed
        }

    def digest(self) -> int:
        """A number below 2^32 for what was learned before this step, equal at both ends."""
        return self._digest

    def state_dict(self) -> dict[str, Any]:
        """Between two steps."""
        return {
            "version": self.version,
            "bases": {
                str(version): (basis.entry_DK, basis.shift_K, basis.order_D)
                for version, basis in self.bases.items()
            },
            "models": self.model_MK,
            "scales": self._scales_MT,
            "choices": self._choices_MC,
            "pieces": {str(index): as_bytes(data) for index, data in self._pieces.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self.bases = {int(v): Basis(*basis) for v, basis in state["bases"].items()}
        self.model_MK, self._scales_MT = state["models"].clone(), state["scales"].clone()
        self._choices_MC = state["choices"].clone()
        self._pieces = {int(i): data.numpy().tobytes() for i, data in state["pieces"].items()}
        self._turns = {}
        self.discard()

    def _known_pieces(self) -> dict[int, bytes]:
        """Also those of this step; with another first one a sender begins again."""
        restarted = 0 in self._new_pieces and 0 in self._pieces
        return ({} if restarted else self._pieces) | self._new_pieces

    def discard(self) -> None:
        """End a step that does not count."""
        self.scales = [_tables(self._scales_MT[kind]) for kind in KINDS]
        self.choices = [_tables(self._choices_MC[kind]) for kind in KINDS]
        crc = zlib.crc32(struct.pack("<qq", self.version, len(self._pieces)))
        for tensor in (self.model_MK, self._scales_MT, self._choices_MC):
            crc = zlib.crc32(tensor.numpy().tobytes(), crc)
        # once a step, not with each message
        self._digest = zlib.crc32(struct.pack("<I", self.basis.checksum), crc)
        self._new_scales_MT = torch.zeros_like(self._scales_MT)
        self._new_choices_MC = torch.zeros_like(self._choices_MC)
        self._new_pieces: dict[int, bytes] = {}
        self._proposal = None
        self._sums = [torch.zeros(4, self.basis.dimensions, dtype=torch.int64) for _ in KINDS]


@functools.cache
def _alike() -> Tensor:
    """What tokens of each scale are multiplied by, so that large ones count for no more."""
    return torch.tensor([math.isqrt(1 << (24 + UNSCALED - t)) for t in range(SCALES)])


def _tables(seen_S: Tensor) -> Tables:
    """Frequencies close to those that were seen, none of them 0."""
    count_S = seen_S + 1
    spare = (1 << PROBABILITY_BITS) - len(count_S)
    frequency_S = 1 + count_S * spare // int(count_S.sum())
    # what rounding leaves costs least there; argmax takes the first of equals
    frequency_S[int(frequency_S.argmax())] += (1 << PROBABILITY_BITS) - int(frequency_S.sum())
    return Tables(frequency_S[None].int())


def _faded(count_MS: Tensor, new_MS: Tensor) -> Tensor:
    """Counts to which a step's were added; those of kinds that it had none of stay."""
    known_M1 = new_MS.sum(1, keepdim=True) > 0
    return torch.where(known_M1, count_MS // 2 + new_MS, count_MS)  # halved: the newest count most
