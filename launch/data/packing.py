"""Documents to sequences of one length: several in each, or one.

Best fit, longest first: each document goes where the least room is left that holds it (Ding et al.,
"Fewer Truncations Improve Language Modeling", 2024). It is drawn once, from the seed: documents of
one length, and the sequences, are in an order of their own. So a sample id stands for the same
tokens in every epoch, on every rank and after a resume, which AQ-SGD's caches need. The same holds
for mixtures.

Axes: B samples, T tokens.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinpipe.launch.data.documents import Documents
from thinpipe.launch.data.sample_set import Ids, checked_ids
from thinpipe.launch.data.sampler import shuffled
from thinpipe.pipeline.batch import IGNORED_TARGET, Batch

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How documents become sequences: `length` inputs, `packs` several, `prefix` bidirectional."""

    length: int
    packs: bool
    prefix: bool
    seed: int


@dataclass(eq=False)
class PackedSet:
    """Samples that are read from documents when they are asked for; `pack` makes them."""

    documents: Documents
    layout: Layout
    pieces: _Ints
    """Of each piece its document, its first token and the one after its last; int64 [3, pieces]."""
    starts: _Ints
    """Sequence s holds the pieces from `starts[s]` to `starts[s + 1]` - 1."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        shape = (len(ids_B), self.layout.length)
        inputs_BT = torch.zeros(shape, dtype=torch.int64)
        targets_BT = torch.full(shape, IGNORED_TARGET, dtype=torch.int64)
        segments_BT = torch.zeros(shape, dtype=torch.int32)
        prefix_BT = torch.zeros(shape, dtype=torch.bool)
        for row, sample in enumerate(ids_B.tolist()):
            start = 0
            for segment, piece in enumerate(self._pieces_of(sample).T.tolist(), start=1):
                document = self.documents.read(*piece)
                stop = start + len(document) - 1
                tokens = torch.from_numpy(document.tokens.astype(np.int64))
                inputs_BT[row, start:stop] = tokens[:-1]
                counts = torch.ones(len(document) - 1, dtype=torch.bool)
                if document.counts is not None:
                    counts = torch.from_numpy(document.counts[1:])
                targets_BT[row, start:stop] = torch.where(counts, tokens[1:], IGNORED_TARGET)
                segments_BT[row, start:stop] = segment
                first = int(counts.int().argmax()) + 1 if counts.any() else len(counts)
                prefix_BT[row, start : start + first] = True
                start = stop
        return Batch(
            inputs_BT,
            targets_BT,
            ids_B,
            mask_BT=segments_BT > 0,
            segments_BT=segments_BT if self.layout.packs else None,
            prefix_BT=prefix_BT if self.layout.prefix else None,
        )

    def select(self, samples: _Ints) -> "PackedSet":
        parts = [self._pieces_of(sample) for sample in samples]
        starts = np.cumsum([0, *(part.shape[1] for part in parts)])
        return replace(self, pieces=np.concatenate(parts, axis=1), starts=starts)

    @cached_property
    def digest(self) -> str:
        """Of the documents and of where they are, not of every batch that they make."""
        layout = replace(self.layout, seed=0)
        digest = hashlib.sha256(f"{self.documents.digest} {layout}".encode())
        digest.update(self.pieces.tobytes() + self.starts.tobytes())
        return digest.hexdigest()

    def _pieces_of(self, sample: int) -> _Ints:
        return self.pieces[:, self.starts[sample] : self.starts[sample + 1]]


def pack(documents: Documents, layout: Layout, notes: Sequence[str] = ()) -> PackedSet:
    """Sequences of documents; ones that are longer are divided, each part a document of its own.

    Parts share a token, so that each token but the first is predicted once.
    """
    pieces = _pieces(documents.lengths, layout.length)
    if not layout.packs:
        starts = np.arange(pieces.shape[1] + 1)
        return PackedSet(documents, layout, pieces, starts, tuple(notes))
    sizes = pieces[2] - pieces[1] - 1  # the last token is a target only
    order, starts = best_fit(sizes, layout.length, layout.seed)
    found = PackedSet(documents, layout, pieces[:, order], starts)
    if len(found):
        filled = sizes.sum() / (len(found) * layout.length)
        notes = (
            *notes,
            f"note: packing: {len(sizes)} examples in {len(found)} sequences of "
            f"{layout.length}, {100 * filled:.1f} % filled",
        )
    return replace(found, notes=tuple(notes))


def best_fit(sizes: npt.NDArray[Any], capacity: int, seed: int) -> tuple[_Ints, _Ints]:
    """Put pieces of these sizes (1 to `capacity`) into sequences, best fit and longest first.

    Returns the pieces by sequence, and where in them each sequence begins; and their number.
    Pieces of one size are placed together, so the time is that of the distinct sizes.
    """
    drawn = shuffled(len(sizes), seed, "pack").numpy()
    drawn = drawn[np.argsort(-sizes[drawn], kind="stable")]
    sequence = np.empty(len(sizes), dtype=np.int64)
    bins = _Bins(capacity)
    _, firsts = np.unique(-sizes[drawn], return_index=True)
    for first, stop in pairwise([*firsts, len(drawn)]):
        bins.place(drawn[first:stop], int(sizes[drawn[first]]), sequence)
    renamed = shuffled(bins.count, seed, "sequences").numpy()
    sequence = renamed[sequence[drawn]] if bins.count else sequence
    order = drawn[np.argsort(sequence, kind="stable")]
    counts = np.bincount(sequence, minlength=bins.count)
    return order, np.cumsum(np.concatenate([[0], counts])).astype(np.int64)


def mix(sizes: Sequence[int], weights: Sequence[float], seed: int) -> list[npt.NDArray[np.int64]]:
    """Which examples of each source are taken: as many as its weight demands, and none twice.

    The source that is the shortest for its weight is used up.
    """
    pairs = [*zip(sizes, weights, strict=True)]
    most = min(size / weight for size, weight in pairs)
    return [
        np.sort(shuffled(size, seed, f"mix/{number}").numpy()[: max(1, round(most * weight))])
        for number, (size, weight) in enumerate(pairs)
    ]


class _Bins:
    """Sequences by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self.count, self._capacity = 0, capacity
        self._rooms: list[int] = []
        self._open: dict[int, list[_Ints]] = {}

    def place(self, pieces: _Ints, size: int, sequence: _Ints) -> None:
        """Write into `sequence` where the pieces go, all of one size."""
        done = 0
        while done < len(pieces):
            left = len(pieces) - done
            room, found = self._least(size, left)
            each = room // size  # once a sequence is begun, no other has less room
            full = min(len(found), left // each)
            sequence[pieces[done : done + full * each]] = np.repeat(found[:full], each)
            self._keep(room - each * size, found[:full])
            done += full * each
            rest = found[full:]
            if 0 < len(pieces) - done < each and len(rest):
                last = len(pieces) - done
                sequence[pieces[done:]] = rest[0]
                self._keep(room - last * size, rest[:1])
                done, rest = len(pieces), rest[1:]
            self._keep(room, rest)

    def _least(self, size: int, pieces: int) -> tuple[int, _Ints]:
        """The least room that holds a piece, and sequences that have it, else new ones."""
        at = bisect_left(self._rooms, size)
        if at == len(self._rooms):
            needed = -(-pieces // (self._capacity // size))
            self.count += needed
            return self._capacity, np.arange(self.count - needed, self.count)
        room = self._rooms[at]
        found = self._open[room].pop(0)
        if not self._open[room]:
            del self._open[room], self._rooms[at]
        return room, found

    def _keep(self, room: int, sequences: _Ints) -> None:
        if room == 0 or not len(sequences):
            return
        if room not in self._open:
            self._open[room] = []
            insort(self._rooms, room)
        self._open[room].append(sequences)


def _pieces(lengths: npt.NDArray[Any], length: int) -> _Ints:
    """Documents cut into parts of `length` inputs; what has no input and target is left out."""
    parts = np.maximum(0, -(-(lengths - 1) // length))
    document = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = number * length
    return np.stack([document, start, np.minimum(start + length + 1, lengths[document])])
