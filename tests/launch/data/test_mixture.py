"""Mixtures by weight: nothing twice, the scarcest source used up."""

from hypothesis import given
from hypothesis import strategies as st

from thinpipe.launch.data.packing import mix


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0.1, 10), st.integers(0, 99))
def test_mixtures_follow_the_weights_and_repeat_nothing(
    ones: int, twos: int, weight: float, seed: int
) -> None:
    first, second = (part.tolist() for part in mix([ones, twos], [1.0, weight], seed))
    assert len(set(first)) == len(first) <= ones
    assert len(set(second)) == len(second) <= twos
    assert len(first) == ones or len(second) == twos
    assert abs(len(second) - weight * len(first)) <= max(1, weight)
    again = mix([ones, twos], [1.0, weight], seed)
    assert [part.tolist() for part in again] == [first, second]
