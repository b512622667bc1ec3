"""Mixtures: how many examples of each source, and which.

They are drawn once, from the run's seed: a sample id must mean the same tokens in every epoch, as
AQ-SGD caches activations by id.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinpipe.launch.data.sampler import shuffled


def mix(
    sizes: Sequence[int], weights: Sequence[float] | None, seed: int
) -> list[npt.NDArray[np.int64]]:
    """Which examples of each source are taken: as many as its weight demands, and none twice.

    The source that is the shortest for its weight is used up; without weights all are.
    """
    if weights is None:
        return [np.arange(size) for size in sizes]
    most = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    found = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        count = min(size, max(1, round(most * weight)))
        found.append(np.sort(shuffled(size, seed, f"mix/{number}").numpy()[:count]))
    return found
