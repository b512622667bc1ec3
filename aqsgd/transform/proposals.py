"""New bases on their way from the sender, a piece to a message.

They are searched on a thread, in parallel with the next step: what is found after a step is sent
from the step after the next one on, always, so that a resumed run continues bit for bit. Only the
first search is waited for.
"""

import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.basis_search import NOTHING, BasisSearch, SearchResult, Seen, Spectrum
from thinpipe.aqsgd.transform.coefficients import as_bytes
from thinpipe.aqsgd.transform.learned import CHANGE, Kind, Learned
from thinpipe.aqsgd.transform.proposal import Proposal
from thinpipe.pipeline.wire.thread import Worker

PIECE_NBYTES = 256 * 1024  # all receives have room for one; 1,600 channels take about ten
_LONGEST_SEARCH_S = 60.0  # at a process's end; eigenvectors of 1,600 channels take 0.33 s
_MANY_TOKENS = 1 << 40  # so many that any saving pays


class Piece(NamedTuple):
    """Number `place` of the `of` parts of a basis; no bytes where there is none to send."""

    place: int
    of: int
    data: bytes


NO_PIECE = Piece(0, 0, b"")


class Proposals:
    """The sender's search, and what of the last basis found is still to be sent."""

    def __init__(self, width: int, share: float) -> None:
        self._width, self._search = width, BasisSearch(width, share)
        self._worker = Worker("basis search")
        self._job: Future[SearchResult] | SearchResult = NOTHING
        # a process must not end while a thread is inside torch: it would abort
        weakref.finalize(self, self._worker.stop, _LONGEST_SEARCH_S)
        self._pieces: list[Piece] = []
        self._sent = 0  # in steps that count
        self._next = 0
        self._room, self._tokens = self._search.room(), 0
        self.spectrum: Spectrum | None = None
        self._forget_step()

    def next_piece(self, learned: Learned) -> Piece:
        """What the next message brings along; all again if the ends had to start again."""
        if learned.received < self._sent:
            self._sent = self._next = learned.received
        if self._next == len(self._pieces):
            return NO_PIECE
        self._next += 1
        return self._pieces[self._next - 1]

    def see(self, kind: Kind, sent_ND: Tensor, value_ND: Tensor, *, of: int) -> None:
        """Take in some `of` so many tokens that were sent, in steps: what was coded, and values."""
        self._new_tokens += of
        room = self._room - sum(len(seen.sent_ND) for seen in self._new_seen)
        if room > 0:
            self._new_seen.append(Seen(kind, sent_ND[:room], value_ND[:room]))

    def finish_step(self, learned: Learned, *, keep: bool) -> None:
        """Look for a better basis when all of the last one has arrived, or send again."""
        if not keep:
            self._next = self._sent
            self._forget_step()
            return
        self._sent = self._next
        self._tokens += self._new_tokens
        if self._sent == len(self._pieces):
            if self._pieces:
                self._pieces, self._sent, self._next = [], 0, 0
                self._search.adopted()
            self._look(learned)
        self._forget_step()

    def state_dict(self) -> dict[str, Any]:
        """Between two steps; waits for a search."""
        found = self._waited()
        data = b"".join(piece.data for piece in self._pieces)
        return {
            "search": self._search.state_dict(),
            "found": None if found.proposal is None else as_bytes(found.proposal.packed()),
            "spectra": [one and list(one) for one in (self.spectrum, found.spectrum)],
            "pieces": as_bytes(data) if data else None,
            "sent": self._sent,
            "room": self._room,
            "tokens": self._tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._search.load_state_dict(state["search"])
        data = b"" if state["pieces"] is None else state["pieces"].numpy().tobytes()
        self._pieces = _cut(data)
        self._sent = self._next = state["sent"]
        self._room, self._tokens = state["room"], state["tokens"]
        self.spectrum, last = (one and Spectrum(*one) for one in state["spectra"])
        found = state["found"]
        if found is not None:
            found = Proposal.unpacked(found.numpy().tobytes(), self._width)
        self._job = SearchResult(found, last)
        self._forget_step()

    def _look(self, learned: Learned) -> None:
        """Take what the last step showed, or search in this one."""
        found = self._taken()
        if found.proposal is None and self._tokens:  # none are sent at the other end
            first = learned.version == 0
            seen, tokens, self._tokens = self._new_seen, self._tokens, 0
            self._room = self._search.room()
            job = partial(self._search.end_step, seen, tokens, learned.basis, first=first)
            self._job = self._worker.submit(job)
            found = self._taken() if first else NOTHING
        if found.proposal is not None:
            self._pieces = _cut(found.proposal.packed())

    def _taken(self) -> SearchResult:
        found, self._job = self._waited(), NOTHING
        self.spectrum = found.spectrum or self.spectrum
        return found

    def _waited(self) -> SearchResult:
        if isinstance(self._job, Future):
            self._job = self._job.result()
        return self._job

    def _forget_step(self) -> None:
        self._new_seen: list[Seen] = []
        self._new_tokens = 0


def settled(sent_ND: Tensor, value_ND: Tensor, step: float, share: float) -> Proposal:
    """The basis that is found for tokens like these; `step` is a multiple of the rms of `sent`."""
    size, width = step * float(sent_ND.square().mean().sqrt()), sent_ND.shape[1]
    seen = [Seen(CHANGE, sent_ND / size, value_ND / size)]
    found = BasisSearch(width, share).end_step(
        seen, _MANY_TOKENS, Basis.identity(width), first=True
    )
    assert found.proposal is not None
    return found.proposal


def _cut(data: bytes) -> list[Piece]:
    starts = range(0, len(data), PIECE_NBYTES)
    return [
        Piece(place, len(starts), data[start : start + PIECE_NBYTES])
        for place, start in enumerate(starts)
    ]
