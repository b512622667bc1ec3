"""New bases on their way from the sender, a piece to a message."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from thinpipe.aqsgd.transform.basis_search import BasisSearch
from thinpipe.aqsgd.transform.learned import Learned

PIECE_NBYTES = 256 * 1024


class Piece(NamedTuple):
    """Number `place` of the `of` parts of a basis; no bytes where there is none to send."""

    place: int
    of: int
    data: bytes


NO_PIECE = Piece(0, 0, b"")


class Proposals:
    """The sender's search, and what of the last basis found is still to be sent."""

    def __init__(self, width: int) -> None:
        """Of tokens of `width` channels."""
        self.search = BasisSearch(width)
        self._pieces: list[Piece] = []
        self._sent = 0  # in steps that count
        self._next = 0

    def next_piece(self, learned: Learned) -> Piece:
        """What the next message brings along; all again if the ends had to start anew."""
        if learned.received < self._sent:
            self._sent = self._next = learned.received
        if self._next == len(self._pieces):
            return NO_PIECE
        self._next += 1
        return self._pieces[self._next - 1]

    def finish_step(self, learned: Learned, *, keep: bool) -> None:
        """Look for a better basis when all of the last one has arrived, or send again."""
        if not keep:
            self._next = self._sent
            self.search.discard()
            return
        self._sent = self._next
        if self._sent < len(self._pieces):
            return
        if self._pieces:
            self._pieces, self._sent, self._next = [], 0, 0
            self.search.adopted()
        found = self.search.end_step(learned.basis, first=learned.version == 0)
        if found is not None:
            self._pieces = _cut(found.packed())

    def state_dict(self) -> dict[str, Any]:
        """Between two steps."""
        data = bytearray(b"".join(piece.data for piece in self._pieces))
        return {
            "search": self.search.state_dict(),
            "pieces": torch.frombuffer(data, dtype=torch.uint8) if data else None,
            "sent": self._sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.search.load_state_dict(state["search"])
        data = b"" if state["pieces"] is None else state["pieces"].numpy().tobytes()
        self._pieces = _cut(data)
        self._sent = self._next = state["sent"]


def _cut(data: bytes) -> list[Piece]:
    starts = range(0, len(data), PIECE_NBYTES)
    return [
        Piece(place, len(starts), data[start : start + PIECE_NBYTES])
        for place, start in enumerate(starts)
    ]
