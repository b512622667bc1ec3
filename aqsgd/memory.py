"""What was last seen of each sample, at one end of one direction of a cut.

Rows are stored as a codec's bytes (a float format, or 8-bit), keyed by sample id. Both ends store
the same values with the same codec, so they hold the same bits. A step's new rows are staged and
become visible at `commit`; the rows they replace are filled again by later steps.

Axes: B samples, N values of a sample.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.wire.cast import Cast
from pipeline.wire.codec import Codec


class Visit(NamedTuple):
    """A known sample in a step: its old values, its new ones, and the bytes these will be."""

    sample: int
    old_1N: Tensor
    fresh_1N: Tensor
    row_1W: Tensor


class SampleMemory:
    """Last seen values by sample id; ids that were never committed are unknown."""

    def __init__(self, codec: Codec) -> None:
        """`codec` turns values into stored bytes; it must be deterministic."""
        self._codec = codec
        self._rows: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []

    def __len__(self) -> int:
        """Number of samples held."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(row.numel() for row in self._rows.values())

    def known(self, ids_B: Tensor) -> Tensor:
        """Which samples have been seen, bool [B]."""
        return torch.tensor([sample in self._rows for sample in ids_B.tolist()], dtype=torch.bool)

    def read(self, ids_B: Tensor, numel: int) -> Tensor:
        """fp32 values [B, N] of known samples.

        Raises:
            ValueError: a sample was of another size when it was seen: its content has changed.
        """
        rows = [self._row(sample, numel) for sample in ids_B.tolist()]
        out_BN = torch.empty(len(rows), numel)
        if rows:
            self._codec.decode(torch.stack(rows), out_BN)
        return out_BN

    def open(self, sample: int, numel: int) -> Visit:
        """The old values of a known sample, and room for the new ones; ends with `close`.

        A memory in a float format lends its own bytes; a quantized one is read and written as fp32.

        Raises:
            ValueError: the sample was of another size when it was seen.
        """
        row_1W = self._row(sample, numel).unsqueeze(0)
        fresh_1W = self._empty_row(row_1W.shape[1]).unsqueeze(0)
        if isinstance(self._codec, Cast):
            dtype = self._codec.dtype
            return Visit(sample, row_1W.view(dtype), fresh_1W.view(dtype), fresh_1W)
        old_1N = torch.empty(1, numel)
        self._codec.decode(row_1W, old_1N)
        return Visit(sample, old_1N, torch.empty(1, numel), fresh_1W)

    def close(self, visit: Visit, *, keep: bool) -> None:
        """Stage what was written to `visit.fresh_1N`, or forget it if it is not finite."""
        if not keep:
            self._spare.append(visit.row_1W[0])
            return
        if not isinstance(self._codec, Cast):
            self._codec.encode(visit.fresh_1N, visit.row_1W, noise=None)
        self._staged[visit.sample] = visit.row_1W[0]

    def stage(self, ids_B: Tensor, values_BN: Tensor) -> None:
        """Keep new values aside until `commit`.

        A row that is not finite is not kept: both ends see it alike, and the sample's next visit
        is a first visit.
        """
        finite = torch.isfinite(values_BN).all(1).tolist()
        nbytes = self._codec.nbytes(values_BN.shape[1])
        for sample, values_N, keep in zip(ids_B.tolist(), values_BN, finite, strict=True):
            if keep:
                self._staged[sample] = self._empty_row(nbytes)
                row_1W = self._staged[sample].unsqueeze(0)
                self._codec.encode(values_N.unsqueeze(0), row_1W, noise=None)

    def commit(self) -> None:
        """Make staged rows the memory."""
        self._spare += [self._rows[sample] for sample in self._staged if sample in self._rows]
        self._rows.update(self._staged)
        self._staged = {}

    def discard(self) -> None:
        """Forget staged rows."""
        self._spare += self._staged.values()
        self._staged = {}

    def digest(self) -> str:
        """SHA-256 of ids and bytes: equal on both ends, always."""
        hasher = hashlib.sha256()
        for sample in sorted(self._rows):
            hasher.update(sample.to_bytes(8, "little", signed=True))
            hasher.update(self._rows[sample].numpy().data)
        return hasher.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Ids, row lengths and all bytes end to end."""
        ids = sorted(self._rows)
        rows = [self._rows[sample] for sample in ids]
        return {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "nbytes": torch.tensor([row.numel() for row in rows], dtype=torch.int64),
            "rows": torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the memory; staged rows are forgotten."""
        parts = torch.split(state["rows"], state["nbytes"].tolist())
        ids = state["ids"].tolist()
        self._rows = {sample: part.clone() for sample, part in zip(ids, parts, strict=True)}
        self._staged, self._spare = {}, []

    def _row(self, sample: int, numel: int) -> Tensor:
        row, nbytes = self._rows[sample], self._codec.nbytes(numel)
        if row.numel() != nbytes:
            raise ValueError(
                f"sample {sample} has {numel} values but its memory holds {row.numel()} bytes, "
                f"not {nbytes}: its length changed. Give changed content a new sample id"
            )
        return row

    def _empty_row(self, nbytes: int) -> Tensor:
        """A row to fill; one that was replaced spares the cost of touching new memory."""
        while self._spare:
            row = self._spare.pop()
            if row.numel() == nbytes:
                return row
        return torch.empty(nbytes, dtype=torch.uint8)
