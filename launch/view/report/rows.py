"""Steps as the rows of charts: of a long run, neighbours are merged into one row."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from thinpipe.launch.view.report.metrics import StepRecord

MOST_ROWS = 4000
"""An even number; more cannot be seen, and half of them are kept when they are reached."""

Value: TypeAlias = float | None
Row: TypeAlias = Mapping[str, Value]

_MERGES: Mapping[str, Callable[[list[float]], float]] = {"low": min, "high": max, "skipped": sum}
_LAST = ("step", "epoch", "eval", "eval_compressed")


class Rows:
    """Columns by name, one value for each `stride` steps: their mean, `low` and `high` of losses.

    `step` is the last of a row's, which also has the row's last evaluation, and how many steps were
    skipped. None stands for what is not finite or was not measured.
    """

    def __init__(self, records: Sequence[StepRecord] = ()) -> None:
        self.stride = 1
        self._rows: list[Row] = []
        self._open: list[Row] = []
        for record in records:
            self.add(record)

    def add(self, record: StepRecord) -> None:
        if not self._open:
            self._rows.append({})
        self._open.append(_row(record))
        self._rows[-1] = _merged(self._open)
        if len(self._open) == self.stride:
            self._open = []
        if len(self._rows) == MOST_ROWS and not self._open:
            self._rows = [_merged(self._rows[i : i + 2]) for i in range(0, MOST_ROWS, 2)]
            self.stride *= 2

    def columns(self) -> dict[str, list[Value]]:
        names = dict.fromkeys(name for row in self._rows for name in row)
        return {name: [row.get(name) for row in self._rows] for name in names}


def _row(record: StepRecord) -> Row:
    loss = _finite(record.loss)
    row: dict[str, Value] = {
        "step": record.step,
        "epoch": record.epoch,
        "loss": loss,
        "tokens_per_s": _finite(record.tokens_per_s),
        "bubble": _finite(100 * record.bubble),
        "skipped": 1.0 if record.skipped else None,
    }
    for name, value in (record.eval or {}).items():
        if name in ("loss", "loss_compressed"):
            row[name.replace("loss", "eval")] = _finite(value)
    for count in record.wire:
        row[f"{count.cut} {count.direction}"] = count.nbytes
    for way in ("forward", "backward"):
        for name in ("channel_error", "channel_change"):
            found = [getattr(c, name) for c in record.wire if c.direction == way]
            row[f"{name} {way}"] = _mean(found)
    return row


def _merged(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    out: dict[str, Value] = {}
    rows = [dict({"low": row.get("loss"), "high": row.get("loss")}, **row) for row in rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        known = [value for row in rows if (value := row.get(name)) is not None]
        if not known:
            out[name] = None
        elif name in _LAST:
            out[name] = known[-1]
        else:
            merge: Callable[[list[float]], float] = _MERGES.get(name, fmean)
            out[name] = float(f"{merge(known):.7g}")
    return out


def _finite(value: float) -> Value:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _mean(values: Sequence[Value]) -> Value:
    known = [value for value in values if value is not None]
    return _finite(fmean(known)) if known else None


def smoothed(values: Sequence[float], reach: int) -> npt.NDArray[np.float64]:
    """At every step, the line that fits `reach` steps to either side best, nearer ones most.

    Within the curve that is their weighted mean. At the ends, where one side is missing, a mean
    would lag behind a falling curve, and one of mirrored values would follow the last value; the
    line does neither. It is fitted to more steps there, as it has fewer on one side. NaN and
    infinity are left out.
    """
    y = np.asarray(values, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(y))
    out = np.full(y.shape, np.nan)
    if not finite.size:
        return out
    for i in range(y.size):
        missing = max(0, reach - min(i, y.size - 1 - i))
        near = finite[np.abs(finite - i) <= reach + missing]
        if not near.size:
            near = finite[[np.abs(finite - i).argmin()]]
        x = (near - i).astype(np.float64)
        weight = 1.0 - np.abs(x) / (reach + missing + 1)
        weight = np.maximum(weight, 1e-6)
        mean_x, mean_y = np.average(x, weights=weight), np.average(y[near], weights=weight)
        spread = np.average((x - mean_x) ** 2, weights=weight)
        slope = (
            np.average((x - mean_x) * (y[near] - mean_y), weights=weight) / spread if spread else 0
        )
        out[i] = mean_y - slope * mean_x
    return out
