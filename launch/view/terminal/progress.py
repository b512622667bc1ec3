"""Recent values of the steps so far, for the display."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean

from thinpipe.launch.view.report.metrics import StepRecord

LOSS_STEPS = 10  # a batch's loss alone jumps from step to step

_SPARK_CELLS = 60  # with its label in 80 columns
_SPARK = "▁▂▃▄▅▆▇█"


class RunningValues:
    """Running values over the steps so far."""

    def __init__(self) -> None:
        self.record: StepRecord | None = None
        self.mean_loss = math.nan
        """Of the last steps with a finite loss."""
        self.eval: Mapping[str, float] | None = None
        self.skipped = 0
        self.spark = Sparkline(_SPARK_CELLS)
        self._losses: deque[float] = deque(maxlen=LOSS_STEPS)

    def update(self, record: StepRecord) -> None:
        if math.isfinite(record.loss):
            self._losses.append(record.loss)
            self.mean_loss = fmean(self._losses)
        self.spark.add(self.mean_loss)
        self.skipped += record.skipped
        self.record = record


class Sparkline:
    """A curve of any length in fewer than `cells` (an even number) characters.

    When the cells are full, neighbours are merged, and from then on each holds twice the values.
    """

    def __init__(self, cells: int) -> None:
        self._limit = cells
        self._per_cell = 1
        self._means: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        if value != value:
            return
        self._open.append(value)
        if len(self._open) == self._per_cell:
            self._means.append(sum(self._open) / self._per_cell)
            self._open = []
        if len(self._means) == self._limit:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(a + b) / 2 for a, b in pairs]
            self._per_cell *= 2

    def __str__(self) -> str:
        means = list(self._means)
        if not means:
            return ""
        low, high = min(means), max(means)
        scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARK[round((mean - low) * scale)] for mean in means)
