"""Streams: each sample once, the same on every rank, and from where it was after a resume."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.streams.stream import StreamSampler, StreamSet


def _rows(folder: Path, count: int = 400) -> Path:
    chosen = random.Random(0)
    rows = [
        {"text": f"{n:05d} " + "x" * chosen.randrange(30), "prompt": f"{n:05d}?", "answer": "yes"}
        for n in range(count)
    ]
    for part in range(4):
        own = rows[part * count // 4 : (part + 1) * count // 4]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return folder


def _config(path: Path | str, **changes: Any) -> DataConfig:
    choices: dict[str, Any] = {
        "path": str(path),
        "text_field": "text",
        "sequence_length": 16,
        "train_sequences": "all",
        "eval_sequences": 4,
        "stream_block": 32,
    }
    return DataConfig(**(choices | changes))


def _stream(config: DataConfig, drawn: int, seed: int = 0) -> tuple[StreamSet, SampleSet]:
    training, held_out = load(config, seed=seed, drawn=drawn)
    assert isinstance(training, StreamSet)
    return training, held_out


PAIRS = {"text_field": None, "prompt_field": "prompt", "response_field": "answer"}
KINDS: dict[str, dict[str, Any]] = {
    "running text": {},
    "packed text": {"packing": True, "sequence_length": 64},
    "prompts": {**PAIRS, "packing": False},
    "packed prompts": {**PAIRS, "sequence_length": 64},
}


def _numbers(batch: Any) -> list[str]:
    """What rows the samples are of."""
    return re.findall(r"\d{5}", bytes(batch.inputs_BT.flatten().tolist()).decode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_gives_each_sample_once_and_goes_on_where_it_was(
    tmp_path: Path, kind: str
) -> None:
    config = _config(_rows(tmp_path), **KINDS[kind])
    whole, held_out = _stream(config, 40)
    batches = [whole.batch(range(n, n + 4)) for n in range(0, 40, 4)]
    seen = [number for batch in batches for number in _numbers(batch)]
    assert len(set(seen)) == len(seen) > 20
    assert not set(seen) & {*_numbers(held_out.batch(range(4)))}
    first, _ = _stream(config, 40)
    for n in range(7):
        first.batch(range(4 * n, 4 * n + 4))
    again, _ = _stream(config, 40)
    assert again.digest == whole.digest
    again.load_state_dict(first.state_dict())
    for n in range(7, 10):
        batch = again.batch(range(4 * n, 4 * n + 4))
        assert torch.equal(batch.inputs_BT, batches[n].inputs_BT)
        assert torch.equal(batch.targets, batches[n].targets)


def test_replicas_share_a_stream_without_doubles(tmp_path: Path) -> None:
    config = _config(_rows(tmp_path))
    whole, _ = _stream(config, 32)
    everything = whole.batch(range(32)).inputs_BT
    found: dict[int, torch.Tensor] = {}
    for replica in range(2):
        samples, _ = _stream(config, 32)
        sampler = StreamSampler(samples, batch_size=8, replicas=2, replica=replica)
        assert sampler.steps_per_epoch == 4
        for step in range(4):
            ids = sampler.ids(step)
            batch = samples.batch(ids)
            assert len(batch) == 4
            assert not set(ids.tolist()) & found.keys()
            found |= dict(zip(ids.tolist(), batch.inputs_BT, strict=True))
    assert torch.equal(torch.stack([found[n] for n in range(32)]), everything)


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    config = _config(_rows(tmp_path))
    one, other = (_stream(config, 8, seed)[0].batch(range(8)).inputs_BT for seed in (0, 1))
    assert not torch.equal(one, other)


def test_a_data_set_of_the_package_is_streamed(tmp_path: Path) -> None:
    """As one of the hub, which the package reads alike; it returns to its place by itself."""
    import datasets  # takes a second

    folder = _rows(tmp_path)
    config = _config(f"hf:{folder}")
    whole, _ = _stream(config, 40)
    expected = whole.batch(range(40)).inputs_BT
    first, _ = _stream(config, 40)
    first.batch(range(20))
    state = first.state_dict()
    assert json.loads(state["items"])["own"] is not None
    again, _ = _stream(config, 40)
    again.load_state_dict(state)
    assert torch.equal(again.batch(range(20, 40)).inputs_BT, expected[20:])
    with pytest.raises(ValueError, match=r"row 1: no field 'txet' among \['text', 'pr"):
        _stream(_config(f"hf:{folder}", text_field="txet"), 40)
    files, _ = _stream(_config(folder), 40)
    assert torch.equal(files.batch(range(40)).inputs_BT, expected)
    datasets.load_dataset(str(folder), split="train").save_to_disk(str(tmp_path / "saved"))
    saved, _ = _stream(_config(tmp_path / "saved"), 40)
    assert torch.equal(saved.batch(range(40)).inputs_BT, expected)


def test_a_stream_that_ends_says_how_far_it_came(tmp_path: Path) -> None:
    samples, _ = _stream(_config(_rows(tmp_path, 80)), 10**6)
    with pytest.raises(ValueError, match=r"the stream ended after \d+ samples, and .* is needed"):
        samples.batch(range(10**6))
    with pytest.raises(ValueError, match=r"eval_sequences = 9999: .* ends after \d+; use fewer"):
        _stream(_config(tmp_path, eval_sequences=9999), 8)


def test_rows_that_cannot_be_used_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": None if n % 3 == 0 else f"text {n}"} for n in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples, _ = _stream(_config(tmp_path, eval_sequences=1), 8)
    samples.batch(range(8))
    assert f"1 row is left out: field 'text' is null ({tmp_path / 'a.jsonl'}:" in caplog.text
    assert "10 rows are left out: field 'text' is null" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_which_no_row_can_be_used_is_passed_over(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (_rows(tmp_path) / "2.jsonl").write_text("{}\n" * 100)
    samples, _ = _stream(_config(tmp_path, stream_block=8, **KINDS[kind]), 4)
    with pytest.raises(ValueError, match="the stream ended after"):
        samples.batch(range(10_000))
    assert "100 rows are left out: no field" in caplog.text


class Endless:
    """An iterable of one's own, without an end."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in itertools.count():
            yield torch.tensor([number, number + 1]), torch.tensor([number + 1, number + 2])


def test_an_iterable_of_ones_own_is_streamed() -> None:
    sizes: dict[str, Any] = {"train_sequences": "all", "eval_sequences": 3, "stream_block": 10}
    config = DataConfig(factory=f"{__name__}:Endless", **sizes)
    samples, held_out = _stream(config, 100)
    first = samples.batch(range(50)).inputs_BT[:, 0].tolist()
    assert not set(first) & set(held_out.batch(range(3)).inputs_BT[:, 0].tolist())
    assert len(set(first)) == 50
    state = samples.state_dict()
    again, _ = _stream(config, 100)
    again.load_state_dict(state)
    assert torch.equal(again.batch(range(50, 60)).inputs_BT, samples.batch(range(50, 60)).inputs_BT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"epochs": 1}}, r"train.max_steps = none: data.stream_block = 8 has no end"),
        ({"train": {"max_steps": 4}}, r"train.epochs = 3: .* one pass; set train.epochs = 1"),
        ({"boundary": []}, r'boundary.forward.kind = "aqsgd" at cut 2: .* kind = "stateless"'),
        ({"data": {"train_sequences": 64}}, r'stream is read as far as .* = "all"'),
        ({"data": {"eval_sequences": "all"}}, r"held out; give their number, or set eval_path"),
    ],
)
def test_settings_that_do_not_fit_a_stream_are_named(changes: dict[str, Any], message: str) -> None:
    sections: dict[str, Any] = {
        "model": {"layers": 4, "width": 32, "heads": 2, "context": 16},
        "data": {
            "path": "a.jsonl",
            "text_field": "text",
            "sequence_length": 16,
            "train_sequences": "all",
            "stream_block": 8,
        },
        "pipeline": {"cuts": [2]},
        "boundary": [{"forward": {"kind": "stateless", "bits": 5}}],
        "train": {"epochs": 1, "max_steps": 4},
    }
    RunConfig.model_validate(sections)
    if "data" in changes:
        changes = {"data": {**sections["data"], **changes["data"]}}
    with pytest.raises((ValueError, ConfigError), match=message):
        RunConfig.model_validate({**sections, **changes})
