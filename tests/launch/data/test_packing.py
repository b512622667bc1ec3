"""Packing: every token once, nearly no padding, the same for one seed; mixtures by weight."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.launch.data.documents import Chosen, Document, Joined
from thinpipe.launch.data.packing import Layout, best_fit, mix, pack
from thinpipe.launch.data.token_file import TokenFile, TokenWriter


def _file(folder: Path, lengths: list[int], *, learnt: int | None = None) -> TokenFile:
    """Documents whose tokens all differ; with `learnt` that many of each are learnt, at its end."""
    writer = TokenWriter(folder, ids=1 << 20, columns=[] if learnt is None else ["counts"])
    first = 0
    for row, length in enumerate(lengths):
        tokens = np.arange(first, first + length, dtype=np.int32)
        counts = None if learnt is None else np.arange(length) >= length - learnt
        writer.add(Document(tokens, counts), row)
        first += length
    writer.finish({})
    return TokenFile.open(folder)


def _layout(length: int = 8, *, packs: bool = True, prefix: bool = False, seed: int = 0) -> Layout:
    return Layout(length, packs, prefix, seed)


def _greedy(sizes: list[int], capacity: int) -> list[int]:
    """How full sequences are by plain best fit, longest first; which of equal ones is left open."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= size]
        if not fitting:
            rooms.append(capacity)
            fitting = [(capacity, len(rooms) - 1)]
        rooms[min(fitting)[1]] -= size
    return [capacity - room for room in rooms]


@given(st.lists(st.integers(1, 12), max_size=60), st.integers(0, 99))
def test_it_is_best_fit_and_keeps_every_piece_once(sizes: list[int], seed: int) -> None:
    order, starts = best_fit(np.array(sizes, dtype=np.int64), 12, seed)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    held = [order[start:stop].tolist() for start, stop in itertools.pairwise(starts)]
    filled = [sum(sizes[piece] for piece in own) for own in held]
    assert all(0 < size <= 12 for size in filled)
    assert Counter(filled) == Counter(_greedy(sizes, 12))


def test_packing_many_documents_is_quick_and_tight() -> None:
    sizes = np.minimum(2048, np.random.default_rng(0).geometric(1 / 300, 200_000))
    _, starts = best_fit(sizes, 2048, 0)
    assert sizes.sum() / ((len(starts) - 1) * 2048) > 0.999


@pytest.mark.parametrize("packs", [True, False])
def test_every_token_of_every_document_is_a_target_once(tmp_path: Path, packs: bool) -> None:
    lengths = [1, 2, 9, 10, 30, 5, 3, 0, 17]
    found = pack(_file(tmp_path / "t", lengths), _layout(packs=packs))
    batch = found.batch(range(len(found)))
    counted = batch.targets[batch.targets != -100]
    firsts = {sum(lengths[:at]) for at in range(len(lengths))}
    expected = [token for token in range(sum(lengths)) if token not in firsts]
    assert sorted(counted.tolist()) == expected
    assert (batch.targets - batch.inputs_BT)[batch.targets != -100].unique().tolist() == [1]
    assert (batch.segments_BT is not None) == packs


def test_ids_mean_the_same_for_one_seed(tmp_path: Path) -> None:
    file = _file(tmp_path / "t", [4, 4, 4, 5, 6, 7, 3, 3, 2, 9, 9] * 4)
    one, two, other = (pack(file, _layout(16, seed=seed)) for seed in (3, 3, 4))
    assert one.digest == two.digest != other.digest
    assert one.batch([2, 0]).inputs_BT.tolist() == two.batch([2, 0]).inputs_BT.tolist()
    assert one.notes == ("note: packing: 44 examples in 12 sequences of 16, 93.8 % filled",)


def test_some_samples_are_those_of_all(tmp_path: Path) -> None:
    found = pack(_file(tmp_path / "t", [3, 5, 7, 2, 6, 4]), _layout(6))
    some = found.select(np.array([2, 0]))
    assert some.batch([0, 1]).inputs_BT.tolist() == found.batch([2, 0]).inputs_BT.tolist()
    assert some.digest != found.digest


def test_what_is_learnt_is_the_target_and_what_is_before_it_a_prefix(tmp_path: Path) -> None:
    found = pack(_file(tmp_path / "t", [5, 4], learnt=2), _layout(prefix=True))
    batch = found.batch([0])
    assert batch.inputs_BT[0].tolist() == [0, 1, 2, 3, 5, 6, 7, 0]
    assert batch.targets[0].tolist() == [-100, -100, 3, 4, -100, 7, 8, -100]
    assert batch.prefix_BT is not None
    assert batch.segments_BT is not None
    assert batch.prefix_BT[0].int().tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert batch.segments_BT[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]


def test_documents_are_chosen_and_joined(tmp_path: Path) -> None:
    one, two = _file(tmp_path / "a", [3, 4, 5]), _file(tmp_path / "b", [6, 2])
    joined = Joined([Chosen(one, np.array([2, 0])), two])
    assert joined.lengths.tolist() == [5, 3, 6, 2]
    tokens = [joined.read(number).tokens.tolist() for number in range(len(joined))]
    assert tokens == [[7, 8, 9, 10, 11], [0, 1, 2], [0, 1, 2, 3, 4, 5], [6, 7]]
    assert joined.read(2, 1, 3).tokens.tolist() == [1, 2]
    assert joined.digest != Joined([one, two]).digest


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
