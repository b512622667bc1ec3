"""Samples of one's own: what an item and a batch may be, and what is rejected."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from thinpipe.launch.data.own import OwnSet, Reading, own_set

ROWS = torch.arange(24).view(6, 4)


def of(items: list[Any], reading: Reading | None = None) -> OwnSet:
    return OwnSet(items, "mine", reading=reading)


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = [item["words"] for item in items]
    words = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"words": words, "mask": words != 0, "labels": torch.tensor([len(r) for r in rows])}


def test_pairs_longer_tuples_and_dicts() -> None:
    pairs = of([(row, row + 1) for row in ROWS]).batch([1, 3])
    assert torch.equal(pairs.inputs_BT, ROWS[[1, 3]])
    assert torch.equal(pairs.targets, ROWS[[1, 3]] + 1)
    three = of([(row, row > 2, i) for i, row in enumerate(ROWS)]).batch([0, 5])
    assert [part.shape for part in three.inputs_BT] == [(2, 4), (2, 4)]
    assert three.targets.tolist() == [0, 5]
    named = of([{"ids": row.tolist(), "labels": i} for i, row in enumerate(ROWS)]).batch([2])
    assert torch.equal(named.inputs_BT["ids"], ROWS[2:3])
    assert named.targets.tolist() == [2]
    assert [len(part) for part in named.split(1)] == [1]


def test_a_collate_function_pads_and_its_parts_are_split_by_samples() -> None:
    items = [{"words": torch.ones(1 + i, dtype=torch.int64)} for i in range(5)]
    batch = of(items, Reading(padded)).batch([0, 4, 2])
    assert batch.inputs_BT["words"].shape == (3, 5)
    assert batch.inputs_BT["mask"].sum(1).tolist() == batch.targets.tolist() == [1, 5, 3]
    first, second = batch.split(2)
    assert first.inputs_BT["mask"].shape == (2, 5)
    assert second.targets.tolist() == [3]


def test_what_a_collate_function_draws_follows_from_the_samples() -> None:
    def masked(items: list[Tensor]) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(len(items)) + random.random()
        return drawn, torch.stack(items)

    before = torch.random.get_rng_state()
    samples = of(list(ROWS), Reading(masked))
    one, same, other = (samples.batch(ids).inputs_BT for ids in ([1, 2], [1, 2], [2, 1]))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("items", "reading", "message"),
    [
        ([torch.zeros(2)], None, "sample 0 is Tensor; return"),
        ([{"ids": torch.zeros(2)}], None, "sample 0 is dict of ids; return .* with labels"),
        ([("text", 1)], None, "sample 0 is tuple of str, int"),
        (
            [(torch.zeros(n), torch.zeros(n)) for n in (2, 3)],
            None,
            r"sample 0 of a batch has shape \[2\] and sample 1 \[3\].*collate function that pads",
        ),
        ([1, 2], Reading(torch.tensor), "the collate function returned Tensor; return"),
        (
            [1, 2],
            Reading(lambda items: (torch.tensor(items), torch.tensor(1))),
            r"returned a tensor of shape \[\] for 2 samples",
        ),
    ],
)
def test_what_is_no_batch_is_rejected(
    items: list[Any], reading: Reading | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"mine: .*{message}"):
        of(items, reading).batch(range(len(items)))


def test_digests_tell_samples_apart_whatever_they_are_made_of() -> None:
    texts = [{"text": f"no {i}", "labels": i % 2} for i in range(5)]
    assert of(texts).digest == of([dict(row) for row in texts]).digest
    assert of(texts).digest != of(texts[::-1]).digest
    with pytest.raises(ValueError, match="sample 0 holds a object, which ranks cannot compare"):
        _ = of([(object(), 1)]).digest


def test_a_data_loader_says_size_order_and_how_batches_are_made() -> None:
    data = TensorDataset(ROWS, ROWS)
    in_order, size = own_set(DataLoader(data, batch_size=3), "mine")
    assert (size, in_order.shuffle) == (3, False)
    drawn, size = own_set(DataLoader(data, 2, shuffle=True, collate_fn=padded), "mine", size=2)
    assert (size, drawn.shuffle, drawn.reading.collate) == (2, True, padded)
    sampler = WeightedRandomSampler([1.0] * 6, 6)
    for loader, message in (
        (DataLoader(data, 2, sampler=sampler), "has a sampler of its own; which samples a step"),
        (DataLoader(data, 2, drop_last=True, num_workers=1), "has drop_last and workers"),
    ):
        with pytest.raises(ValueError, match=message):
            own_set(loader, "mine")
    with pytest.raises(ValueError, match="batch_size = 3, but size = 4; give one of them"):
        own_set(DataLoader(data, 3), "mine", size=4)
    with pytest.raises(ValueError, match=r"give the samples of a step: run\.batches"):
        own_set(data, "mine")
