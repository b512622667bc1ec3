"""An activation cache whose rows are values as a codec stores them: a float format, or quantized.

Both ends store the same values with the same codec, so they hold the same bits.

Axes: B samples, N values of a sample, W bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.memory import UNSEEN, SampleMemory
from thinpipe.aqsgd.store import Store
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Cached, Codec
from thinpipe.pipeline.wire.pinned import brought_to


class Visit(NamedTuple):
    """A known sample in a step: its values, the row of the fresh ones, and where that stays.

    In a float format values are those of the row itself, in place.
    """

    sample: int
    cached: Cached
    row: Tensor
    home: Tensor


class CodedMemory(SampleMemory):
    """A `SampleMemory` of values."""

    def __init__(
        self, codec: Codec, store: Store | None = None, *, capacity: int | None = None
    ) -> None:
        """`codec` turns values into stored bytes; it must be deterministic."""
        super().__init__(codec.capacity, store, capacity=capacity)
        self._codec = codec

    def read(self, ids_B: Tensor, numel: int) -> Tensor:
        """fp32 values [B, N] of known samples."""
        rows = [self.row(sample, numel).cpu() for sample in ids_B.tolist()]
        out_BN = torch.empty(len(rows), numel)
        if rows:
            self._codec.decode(torch.stack(rows), out_BN)
        return out_BN

    def open(self, sample: int, numel: int, device: torch.device) -> Visit:
        """The old values of a known sample, and room for the new ones; ends with `close`.

        Both are on `device`.
        """
        old = brought_to(device, self.row(sample, numel))
        home = self._store.empty_row(old.numel())
        row = _written(home, device)
        if isinstance(self._codec, Cast):
            kind = self._codec.dtype
            cached = Cached(old.view(kind)[None], row.view(kind)[None])
        else:
            old_1N = torch.empty(1, numel, device=device)
            self._codec.decode(old[None], old_1N)
            cached = Cached(old_1N, torch.empty_like(old_1N))
        return Visit(sample, cached, row, home)

    def close(self, visit: Visit, wire: Tensor, *, keep: bool) -> None:
        """Stage what was written to the fresh row, or if it is not to be kept lose the sample.

        Its old values may be why a change to finite ones is none itself. `wire` (host) is what the
        sample was sent as.
        """
        if not keep:
            self._store.give_back(visit.home)
            self.lose(visit.sample)
            return
        if not isinstance(self._codec, Cast):
            self._codec.encode(visit.cached.fresh_BN, visit.row[None], noise=None)
        _bring_home(visit.row, visit.home)
        self._staged[visit.sample] = self._histories[visit.sample].after(wire), visit.home

    def stage(self, ids_B: Tensor, values_BN: Tensor, wire_BW: Tensor) -> None:
        """Keep first values aside until `commit`, with what they were sent as (host).

        A row that is not finite is not kept: both ends see it alike, and the sample's next visit
        is a first visit.
        """
        nbytes = self._fixed_nbytes(values_BN.shape[1], int(ids_B[0]))
        if self._limit is not None and len(self._histories) >= self._limit:
            return
        finite_B = torch.isfinite(values_BN).all(1)
        homes = [self._store.empty_row(nbytes) for _ in values_BN]
        for i, home in enumerate(homes):
            row = _written(home, values_BN.device)
            self._codec.encode(values_BN[i : i + 1], row[None], noise=None)
            _bring_home(row, home)
        for i, (sample, finite) in enumerate(zip(ids_B.tolist(), finite_B.tolist(), strict=True)):
            if finite:
                self._staged[sample] = UNSEEN.after(wire_BW[i]), homes[i]
            else:
                self._store.give_back(homes[i])


def _written(home: Tensor, device: torch.device) -> Tensor:
    """Where `device` can write what is to be in `home`: there, or in a row of its own."""
    return home if home.device == device else torch.empty_like(home, device=device)


def _bring_home(row: Tensor, home: Tensor) -> None:
    if row.data_ptr() != home.data_ptr():
        home.copy_(row)
