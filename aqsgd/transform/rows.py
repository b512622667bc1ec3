"""How samples' coefficients are cached: in rows of as many bytes, whatever K.

These are the version of the basis (u32), the index of the step (i32), a byte per token (3 bits
for how much coarser its own is, 5 for how many low bits it drops), and what the basis keeps of its
coefficients: up to D + 2 max(2, D / 50) bytes.

Axes: T tokens, D channels, K dimensions.
"""

import struct
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.memory import SampleMemory
from thinpipe.aqsgd.transform.basis import Basis, remembered_nbytes, turned
from thinpipe.aqsgd.transform.coefficients import as_bytes
from thinpipe.aqsgd.transform.learned import Learned
from thinpipe.aqsgd.transform.tokens import COARSEST

_HEAD = struct.Struct("<Ii")
_COARSE_BITS = COARSEST.bit_length()


class StoredSample(NamedTuple):
    """What is cached of a sample: whole numbers (int32) of steps in a basis.

    `coarse_T` (int64) is how many half octaves a token's step is above that of index `step`.
    """

    version: int
    step: int
    coarse_T: Tensor
    q_TK: Tensor

    @property
    def steps(self) -> Tensor:
        """Indices of the tokens' steps."""
        return self.step + 2 * self.coarse_T


def row_nbytes(width: int, numel: int) -> int:
    """Bytes of the row of a sample of `numel` values, in tokens of `width` channels."""
    return _HEAD.size + numel // width * (1 + remembered_nbytes(width))


def pack(held: StoredSample, basis: Basis, width: int) -> Tensor:
    """A row of tokens of `width` channels, with what the basis keeps of the numbers."""
    tokens = len(held.q_TK)
    row = torch.zeros(row_nbytes(width, tokens * width), dtype=torch.uint8)
    row[: _HEAD.size] = as_bytes(_HEAD.pack(held.version, held.step))
    stored_TW, more_T = basis.remembered(held.q_TK)
    numbers = row[_HEAD.size :]
    numbers[:tokens] = held.coarse_T | more_T << _COARSE_BITS
    numbers[tokens : tokens + stored_TW.numel()] = stored_TW.flatten()
    return row


def unpack(row: Tensor, bases: Mapping[int, Basis], tokens: int) -> StoredSample:
    """What a row keeps of what `pack` was given."""
    version, step = _HEAD.unpack(row[: _HEAD.size].numpy().tobytes())
    basis, numbers = bases[version], row[_HEAD.size :]
    end = tokens * (1 + remembered_nbytes(basis.dimensions))
    stored_TW = numbers[tokens:end].view(tokens, -1)
    coarse_T, more_T = numbers[:tokens] & COARSEST, numbers[:tokens].int() >> _COARSE_BITS
    q_TK = basis.recalled(stored_TW, more_T)
    return StoredSample(version, step, coarse_T.long(), q_TK)


class Rows:
    """The samples that one end caches, and which bases their rows are in."""

    def __init__(self, memory: SampleMemory, learned: Learned) -> None:
        self.memory, self._learned = memory, learned
        self._version_of: dict[int, int] = {}
        self._staged: dict[int, int] = {}
        self._count: Counter[int] = Counter()

    @property
    def versions(self) -> Collection[int]:
        """Those of bases that rows are in, and maybe of more."""
        return self._count.keys()

    def held(self, sample: int, tokens: int) -> StoredSample:
        """What is cached of a sample, in the current basis."""
        learned = self._learned
        row = self.memory.row(sample, tokens * learned.width).cpu()
        held = unpack(row, learned.bases, tokens)
        if held.version == learned.version:
            return held
        q_TK = turned(held.q_TK, learned.turn_from(held.version))
        return held._replace(version=learned.version, q_TK=q_TK)

    def stage(self, sample: int, held: StoredSample) -> None:
        width = self._learned.width
        row = pack(held, self._learned.basis, width)
        self.memory.renew(sample, row, len(held.q_TK) * width)
        self._staged[sample] = held.version

    def finish_step(self, *, keep: bool) -> None:
        staged, self._staged = self._staged, {}
        if not keep:
            self.memory.discard()
            return
        self.memory.commit()
        for sample, version in staged.items():
            if sample in self.memory:  # there was room
                if sample in self._version_of:
                    self._count[self._version_of[sample]] -= 1
                self._count[version] += 1
                self._version_of[sample] = version
        self._count = +self._count

    def recount(self) -> None:
        """Pass over samples that were forgotten since they were last seen."""
        held = {s: version for s, version in self._version_of.items() if s in self.memory}
        self._version_of, self._count = held, Counter(held.values())

    def state_dict(self) -> dict[str, Any]:
        self.recount()
        pairs = torch.tensor(sorted(self._version_of.items()), dtype=torch.int64)
        return self.memory.state_dict() | {"row_versions": pairs.view(-1, 2)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state)
        self._version_of, self._staged = dict(state["row_versions"].tolist()), {}
        self.recount()
