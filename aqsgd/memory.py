"""What was last seen of each sample, at one end of one direction of a cut.

Rows are stored as a codec's bytes (bf16 or 8-bit), keyed by sample id. Both ends store the same
values with the same codec, so they hold the same bits. A step's new rows are staged and become
visible at `commit`.

Axes: B samples, N values of a sample.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.wire.codec import Codec


class SampleMemory:
    """Last seen values by sample id; ids that were never committed are unknown."""

    def __init__(self, codec: Codec) -> None:
        """`codec` turns values into stored bytes; it must be deterministic."""
        self._codec = codec
        self._rows: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor] = {}

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
        nbytes = self._codec.nbytes(numel)
        rows = [self._rows[sample] for sample in ids_B.tolist()]
        for sample, row in zip(ids_B.tolist(), rows, strict=True):
            if row.numel() != nbytes:
                raise ValueError(
                    f"sample {sample} has {numel} values but its memory holds {row.numel()} bytes, "
                    f"not {nbytes}: its length changed. Give changed content a new sample id"
                )
        out_BN = torch.empty(len(rows), numel)
        if rows:
            self._codec.decode(torch.stack(rows), out_BN)
        return out_BN

    def stage(self, ids_B: Tensor, values_BN: Tensor) -> None:
        """Keep new values aside until `commit`.

        A row that is not finite is not kept: both ends see it alike, and the sample's next visit
        is a first visit.
        """
        rows = torch.empty(len(ids_B), self._codec.nbytes(values_BN.shape[1]), dtype=torch.uint8)
        self._codec.encode(values_BN, rows, noise=None)
        finite = torch.isfinite(values_BN.sum(1)).tolist()
        for sample, row, keep in zip(ids_B.tolist(), rows, finite, strict=True):
            if keep:
                self._staged[sample] = row

    def commit(self) -> None:
        """Make staged rows the memory."""
        self._rows.update((sample, row.clone()) for sample, row in self._staged.items())
        self._staged.clear()

    def discard(self) -> None:
        """Forget staged rows."""
        self._staged.clear()

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
        self._staged.clear()
