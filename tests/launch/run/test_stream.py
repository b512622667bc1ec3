"""Samples without a length: each once, shared among replicas, found again by a resume."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.own import OwnSet, Reading
from thinpipe.launch.data.streams.stream import StreamSampler, StreamSet, own_stream
from thinpipe.launch.run.run import check_stream


class Numbers(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.count):
            self.read += 1
            yield torch.tensor([number]), torch.tensor([number + 1])


def stream(count: int = 100, size: int = 4, steps: int = 10) -> StreamSet:
    return own_stream(Numbers(count), "numbers", size, steps, Reading())


def seen(samples: StreamSet, steps: range, replica: int = 0, replicas: int = 1) -> list[list[int]]:
    sampler = StreamSampler(samples, batch_size=4, replicas=replicas, replica=replica)
    found = []
    for step in steps:
        batch = sampler.batch(step)
        if batch is None:
            break
        assert batch.ids_B.tolist() == batch.inputs_BT[:, 0].tolist(), "the i-th has id i"
        found.append(batch.ids_B.tolist())
    return found


def test_a_resume_goes_on_with_the_next_sample_and_reads_none_twice() -> None:
    before, resumed = stream(), stream()
    seen(before, range(2))
    resumed.load_state_dict(before.state_dict())
    assert seen(resumed, range(2, 4)) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    numbers = Numbers(1000)
    samples = own_stream(numbers, "numbers", 4, 20, Reading())
    seen(samples, range(20))
    assert numbers.read == 80


@pytest.mark.parametrize(("count", "last"), [(10, [8, 9]), (11, [8, 9]), (9, []), (8, [])])
def test_its_end_is_the_same_on_all_replicas(count: int, last: list[int]) -> None:
    both = [seen(stream(count), range(10), replica, 2) for replica in (0, 1)]
    assert len(both[0]) == len(both[1])
    assert sorted(both[0][-1] + both[1][-1]) == (last or [4, 5, 6, 7])


def test_what_cannot_be_read_again_or_is_cached_is_rejected() -> None:
    with pytest.raises(ValueError, match="can be read once only, and a resumed run reads it again"):
        own_stream(iter(Numbers(3)), "numbers", 4, 2, Reading())
    config = RunConfig.model_validate(
        {
            "pipeline": {"cuts": [2]},
            "boundary": [{"forward": {"kind": "aqsgd", "bits": 4}}],
            "train": {"epochs": 1},
        }
    )
    with pytest.raises(ConfigError, match=r'kind = "aqsgd" .cut 2.: caches .* use kind = "statele'):
        check_stream(config, stream())
    check_stream(config, [])
    twice = config.updated(boundary=(), train={"epochs": 2})
    with pytest.raises(ConfigError, match=r"run\.epochs\(2\): a stream is read once"):
        check_stream(twice.updated(boundary=[{"forward": {"kind": "raw"}}]), stream())


def test_batches_of_any_shape_are_collated_as_a_whole_and_draw_anew() -> None:
    """Of variable lengths, which a batch of single samples could not join."""

    def padded(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        longest = max(int(first) for first, _ in items) + 1
        drawn = torch.rand(len(items))
        words = torch.stack([first.expand(longest) for first, _ in items])
        return {"words": words, "drawn": drawn, "labels": torch.cat([last for _, last in items])}

    samples = own_stream(Numbers(100), "numbers", 4, 10, Reading(padded, longest=100))
    assert samples.longest == 100
    sampler = StreamSampler(samples, batch_size=4, replicas=2, replica=1)
    first, second = sampler.batch(0), sampler.batch(1)
    assert first is not None
    assert second is not None
    assert first.inputs_BT["words"].tolist() == [[1] * 4, [3] * 4]
    assert second.inputs_BT["words"].tolist() == [[5] * 8, [7] * 8]
    assert not torch.equal(first.inputs_BT["drawn"], second.inputs_BT["drawn"])
    assert second.targets.tolist() == [6, 8]
    assert len(samples.digest) == 64


def test_a_state_that_cannot_be_saved_is_named() -> None:
    class Odd(Numbers):
        def state_dict(self) -> dict[str, object]:
            return {"at": object()}

        def load_state_dict(self, state: object) -> None: ...

    samples = own_stream(Odd(9), "odd", 4, 2, Reading())
    with pytest.raises(ValueError, match=r"odd: its state_dict cannot be saved .*return numbers"):
        samples.batch([5])


class Placed(Numbers):
    """Goes on where it is; `sticky`: begins where it was sent, as the package datasets does."""

    def __init__(self, count: int, *, sticky: bool) -> None:
        super().__init__(count)
        self.at, self.sent, self.sticky = 0, 0, sticky

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.sticky:
            self.at = self.sent
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.at - 1]), torch.tensor([self.at])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.sent = state["at"]


@pytest.mark.parametrize("sticky", [False, True])
def test_two_runs_of_one_object_begin_at_its_beginning(sticky: bool) -> None:
    numbers = Placed(100, sticky=sticky)
    first = own_stream(numbers, "numbers", 4, 10, Reading())
    digest, state = first.digest, first.state_dict()
    seen(first, range(3))
    state = first.state_dict()
    resumed = own_stream(numbers, "numbers", 4, 10, Reading())
    assert resumed.digest == digest
    resumed.load_state_dict(state)
    assert seen(resumed, range(2, 4)) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert resumed.batch([0]).inputs_BT.tolist() == [[0]], "and back"
    third = own_stream(numbers, "numbers", 4, 10, Reading())
    assert seen(third, range(1)) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"Placed: another run, or run.batches once more, began"):
        seen(resumed, range(1, 9))


def test_items_may_hold_what_only_a_collate_function_knows() -> None:
    class Words(Numbers):
        def __iter__(self) -> Iterator[Any]:
            for number in range(self.count):
                yield {"words": np.array(["a", "b"]), "at": object(), "number": number}

    def collate(items: list[Any]) -> dict[str, Tensor]:
        numbers = torch.tensor([item["number"] for item in items])
        return {"numbers": numbers, "labels": numbers}

    samples = own_stream(Words(100), "words", 4, 10, Reading(collate))
    assert samples.batch([0, 1]).inputs_BT["numbers"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="words: sample 0 holds a ndarray, which ranks cannot"):
        _ = OwnSet([(np.array(["a"]), 1)], "words").digest


def test_an_object_that_does_not_begin_again_is_named() -> None:
    class Lines:
        """Its place is that of a file, which it does not rewind."""

        def __init__(self) -> None:
            self.rest = iter(Numbers(100))

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from self.rest

    lines = Lines()
    samples = own_stream(lines, "lines", 4, 10, Reading())
    seen(samples, range(2))
    with pytest.raises(ValueError, match="Lines was read before and does not begin again with the"):
        own_stream(lines, "lines", 4, 10, Reading())
    with pytest.raises(ValueError, match="Lines was read before and does not begin again with the"):
        samples.batch([0])


def test_a_dataset_of_the_package_is_read_by_two_runs() -> None:
    import datasets

    rows = {"words": [[n] for n in range(40)], "labels": [[n] for n in range(40)]}
    stored = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2)
    first = own_stream(stored, "stored", 4, 10, Reading())
    first.batch(range(12))
    state = first.state_dict()
    again = own_stream(stored, "stored", 4, 10, Reading())
    again.load_state_dict(state)
    assert again.batch(range(12, 16)).inputs_BT["words"].tolist() == [[12], [13], [14], [15]]
    third = own_stream(stored, "stored", 4, 10, Reading())
    assert third.batch([0]).inputs_BT["words"].tolist() == [[0]]


def test_a_dataset_that_was_looked_at_begins_with_its_first_row_or_is_named() -> None:
    """Its state then says the second row; so once it was sent elsewhere it cannot come back."""
    import datasets

    rows = {"words": [[n] for n in range(40)], "labels": [[n] for n in range(40)]}
    stored = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2)
    next(iter(stored))
    first = own_stream(stored, "stored", 4, 10, Reading())
    assert first.batch([0]).inputs_BT["words"].tolist() == [[0]]
    first.batch(range(12))
    first.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="IterableDataset was read before and does not begin"):
        own_stream(stored, "stored", 4, 10, Reading())
