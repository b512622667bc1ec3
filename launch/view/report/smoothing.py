"""A running mean that neither lags nor bends at the ends of a curve."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


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
