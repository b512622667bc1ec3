"""Instruction data: loss on responses, packing fixed by the seed, mixtures by weight."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.launch.data.instructions import Example, Layout, encode_examples, instruction_set, mix
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import ColumnSet
from thinpipe.launch.data.tokenizer import Bytes


def _rows(name: str, count: int) -> list[Row]:
    return [Row(f"{name}:{i}", {"q": f"{name}{i}? ", "a": f"{i}!"}) for i in range(count)]


def _examples(*texts: tuple[str, str]) -> list[Example]:
    rows = [Row("row", {"q": q, "a": a}) for q, a in texts]
    return encode_examples(rows, "q", "a", tokenizer=Bytes())


def _layout(
    length: int = 12, *, packing: bool = True, prefix: bool = True, seed: int = 0
) -> Layout:
    return Layout(length, packing, prefix, seed)


def test_only_the_response_and_its_end_have_a_loss() -> None:
    batch = instruction_set(_examples(("ab", "xyz")), _layout(8)).batch([0])
    assert batch.prefix_BT is not None
    assert batch.mask_BT is not None
    assert bytes(batch.inputs_BT[0].tolist()) == b"abxyz\0\0\0"
    assert batch.targets[0].tolist() == [-100, ord("x"), ord("y"), ord("z"), 0, -100, -100, -100]
    assert batch.prefix_BT[0].int().tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.mask_BT[0].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_causal_data_has_no_prefix_and_unpacked_data_no_segments() -> None:
    plain = instruction_set(_examples(("a", "b")), _layout(packing=False, prefix=False)).batch([0])
    assert plain.prefix_BT is None
    assert plain.segments_BT is None


def _unpacked(found: ColumnSet) -> Counter[tuple[bytes, bytes]]:
    """What (inputs, response) the segments of all sequences hold."""
    batch = found.batch(range(len(found)))
    assert batch.segments_BT is not None
    examples: Counter[tuple[bytes, bytes]] = Counter()
    for inputs, targets, segments in zip(
        batch.inputs_BT, batch.targets, batch.segments_BT, strict=True
    ):
        for segment in range(1, int(segments.max()) + 1):
            own = segments == segment
            counted = targets[own]
            examples[bytes(inputs[own].tolist()), bytes(counted[counted != -100].tolist())] += 1
        assert bool((targets[segments == 0] == -100).all())
    return examples


_texts = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=6), st.text("xy", min_size=1, max_size=6)),
    min_size=1,
    max_size=40,
)


@given(_texts, st.integers(0, 2**31))
def test_packing_keeps_every_example_whole_and_once(
    texts: list[tuple[str, str]], seed: int
) -> None:
    examples = _examples(*texts)
    packed = instruction_set(examples, _layout(14, seed=seed))
    expected = Counter((f"{q}{a}".encode(), f"{a}\0".encode()) for q, a in texts)
    assert _unpacked(packed) == expected
    assert instruction_set(examples, _layout(14, seed=seed)).digest == packed.digest


def test_packing_fills_sequences() -> None:
    examples = _examples(*[("q" * (i % 5 + 1), "a" * (i % 7 + 1)) for i in range(500)])
    packed = instruction_set(examples, _layout(64))
    used = packed.batch(range(len(packed))).mask_BT
    assert used is not None
    assert float(used.float().mean()) > 0.97


def test_packing_depends_on_the_seed() -> None:
    examples = _examples(*[(f"{i}", "b") for i in range(30)])
    digests = {instruction_set(examples, _layout(seed=seed)).digest for seed in (0, 1)}
    assert len(digests) == 2


def test_the_digest_covers_targets_and_prefixes() -> None:
    examples = _examples(("ab", "c"))
    one_later = [Example(examples[0].tokens, examples[0].prompt - 1)]
    digests = {instruction_set(e, _layout(prefix=False)).digest for e in (examples, one_later)}
    digests.add(instruction_set(examples, _layout()).digest)
    digests.add(instruction_set(examples, _layout(packing=False)).digest)
    assert len(digests) == 4


def test_examples_that_do_not_fit_are_left_out_with_a_note() -> None:
    examples = _examples(("a", "b"), ("a" * 20, "b"))
    found = instruction_set(examples, _layout(8))
    assert len(found) == 1
    assert found.notes == (
        "note: data.sequence_length = 8: 1 of 2 examples are longer and are left out",
    )
    with pytest.raises(ValueError, match=r"1 of 1 examples are longer; use longer .* up to 21"):
        instruction_set(examples[1:], _layout(8))


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0.1, 10), st.integers(0, 99))
def test_mixtures_follow_the_weights_and_repeat_nothing(
    ones: int, twos: int, weight: float, seed: int
) -> None:
    sources = [_rows("one", ones), _rows("two", twos)]
    mixed = mix(sources, [1.0, weight], seed)
    counts = Counter(row.where.split(":")[0] for row in mixed)
    assert len({row.where for row in mixed}) == len(mixed)
    assert counts["one"] == ones or counts["two"] == twos
    assert abs(counts["two"] - weight * counts["one"]) <= max(1, weight)
    assert [row.where for row in mix(sources, [1.0, weight], seed)] == [row.where for row in mixed]


def test_without_weights_everything_is_taken() -> None:
    assert len(mix([_rows("one", 3), _rows("two", 9)], None, 0)) == 12


def test_batches_are_in_the_order_of_ids() -> None:
    examples = _examples(*[(chr(97 + i), "x") for i in range(6)])
    found = instruction_set(examples, _layout(2, packing=False))
    batch = found.batch(torch.tensor([4, 1]))
    assert [chr(row[0]) for row in batch.inputs_BT.tolist()] == ["e", "b"]
    assert batch.ids_B.tolist() == [4, 1]
    with pytest.raises(ValueError, match=r"ids \[6\]: the set holds 6"):
        found.batch([6])
