"""Models of coefficients: proper tables, and magnitudes of a logistic distribution."""

import itertools
import math

import pytest

from thinpipe.aqsgd.transform import logistic
from thinpipe.aqsgd.transform.logistic import MODELS
from thinpipe.pipeline.wire.kernels.coefficients import MIDDLE, SYMBOLS


def probabilities(model: int, most: int) -> list[float]:
    """Of |q| = 0, 1, ... under a continuous logistic distribution that is rounded to nearest."""
    scale = 2 ** ((model - 20) / 4) / (2 * math.log(2))
    edges = [1 - math.tanh((k + 0.5) / scale / 2) for k in range(most)]
    return [1 - edges[0], *(a - b for a, b in itertools.pairwise(edges))]


def test_tables_are_of_all_symbols() -> None:
    freq_FS = logistic.tables().freq_KS
    assert freq_FS.shape == (35, SYMBOLS)
    assert bool((freq_FS >= 1).all())
    assert bool((freq_FS.sum(1) == 4096).all())
    assert int(logistic.table_ids().max()) < 30  # the others are of digits
    assert int(logistic.shifts()[logistic.LAST_UNSHIFTED]) == 0
    assert int(logistic.shifts()[logistic.LAST_UNSHIFTED + 1]) == 1


@pytest.mark.parametrize("model", [0, 8, 16, 20, 25])
def test_unshifted_models_have_the_probabilities_of_their_scale(model: int) -> None:
    share_S = logistic.tables().freq_KS[model].double() / 4096
    expected = probabilities(model, 12)
    assert float(share_S[MIDDLE]) == pytest.approx(expected[0], abs=0.01)
    for k in range(1, 11):
        both = float(share_S[MIDDLE + k] + share_S[MIDDLE - k])
        assert both == pytest.approx(expected[k], rel=0.01, abs=0.001)


@pytest.mark.parametrize("model", [4, 20, 30, 50])
def test_magnitudes_are_the_mean_of_their_model(model: int) -> None:
    mean = sum(k * p for k, p in enumerate(probabilities(model, 20_000)))
    assert float(logistic.magnitudes()[model]) / 4096 == pytest.approx(mean, rel=1e-2, abs=2e-4)
    assert bool((logistic.magnitudes().diff() > 0)[5:].all())
    assert len(logistic.magnitudes()) == MODELS
