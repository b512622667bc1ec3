"""The learned transform under every kind of data and model: ends alike, a resume bit-exact."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.huggingface import section
from tests.training import config
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.corpus import check_data
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import EpochSampler

STEPS, SAVED = 9, 5  # an epoch has 3 steps
BOTH: Any = [{"forward": {"kind": "transform"}, "backward": {"kind": "transform"}}]
TOKENS = 32
PROMPTS = {"prompt_field": "prompt", "response_field": "response", "objective": "prefix"}


def _prompts(folder: Path) -> dict[str, Any]:
    rows = [{"prompt": f"{n} and {n + 1}? ", "response": str(2 * n + 1)} for n in range(60)]
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"data": {"path": str(path), **PROMPTS}}


def _packed(folder: Path) -> dict[str, Any]:
    return {"data": {**_prompts(folder)["data"], "packing": True}}


def _sentences(folder: Path) -> dict[str, Any]:
    path = folder / "moods.tsv"
    lines = [f"{'so' * (n % 7)} {'glad' if n % 2 else 'sad'}\t{n % 2}\n" for n in range(40)]
    path.write_text("text\tlabel\n" + "".join(lines))
    return {
        "data": {"path": str(path), "text_field": "text", "label_field": "label"},
        "model": {"task": "classification", "classes": 2},
    }


def _repeated_dropout(folder: Path) -> dict[str, Any]:
    return _sentences(folder) | {
        "model": {
            "task": "classification",
            "classes": 2,
            "dropout": 0.1,
            "dropout_masks": "repeated",
        }
    }


def _bf16(folder: Path) -> dict[str, Any]:
    return _packed(folder) | {"pipeline": {"precision": "bf16"}}


def _lora(folder: Path) -> dict[str, Any]:
    return _prompts(folder) | {"hf": section("gpt2", folder / "gpt2", lora={"rank": 2})}


CASES = [_repeated_dropout, _bf16, pytest.param(_lora, marks=pytest.mark.slow)]
"""Labels; packed prompts; prompts of a model with adapters."""


def _run(given: dict[str, Any]) -> RunConfig:
    base = config(
        model={"context": TOKENS, **given.get("model", {})},
        data={
            **given["data"],
            "sequence_length": TOKENS,
            "train_sequences": 12,
            "eval_sequences": "all",
        },
        pipeline={"microbatches": 2, **given.get("pipeline", {})},
        boundary=BOTH,
        train={"batch_size": 4, "lr": 1e-2},
    )
    return base.updated(model=given["hf"]) if "hf" in given else base


def _digests(built: Built) -> dict[str, tuple[str, int]]:
    """Of every direction, after a check that both ends are alike."""
    found: dict[str, tuple[str, int]] = {}
    for channel in built.engine.channels:
        end: Any = channel.codec.training
        own = end.memory.digest(), end.learned.digest()
        assert found.setdefault(channel.codec.name, own) == own
    return found


def _state(built: Built) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "stages": [stage.submod.state_dict() for stage in built.stages],
            "optimizer": built.optimizer.state_dict(),
            "ends": [channel.codec.training.state_dict() for channel in built.engine.channels],
            "engine": built.engine.state_dict(),
        }
    )


def _restore(built: Built, state: dict[str, Any]) -> None:
    for stage, saved in zip(built.stages, state["stages"], strict=True):
        stage.submod.load_state_dict(saved)
    built.optimizer.load_state_dict(state["optimizer"])
    for channel, saved in zip(built.engine.channels, state["ends"], strict=True):
        channel.codec.training.load_state_dict(saved)
    built.engine.load_state_dict(state["engine"])


def _train(built: Built, samples: SampleSet, steps: range) -> list[Any]:
    sampler = EpochSampler(len(samples), batch_size=4, replicas=1, replica=0, seed=0)
    found = []
    for step in steps:
        totals = built.engine.train_step(samples.batch(sampler.ids(step)), step)
        assert not totals.skipped
        found.append((totals.loss, totals.wire, _digests(built)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_ends_stay_alike_and_a_resume_is_bit_exact(
    tmp_path: Path, case: Callable[[Path], dict[str, Any]]
) -> None:
    run = _run(case(tmp_path))
    samples = check_data(run).train
    torch.manual_seed(0)
    with in_process(run, total_steps=STEPS) as built:
        _train(built, samples, range(SAVED))
        state = _state(built)
        through = _train(built, samples, range(SAVED, STEPS))
    torch.manual_seed(1)
    with in_process(run, total_steps=STEPS) as built:
        _restore(built, state)
        assert _train(built, samples, range(SAVED, STEPS)) == through
    assert all(wire.known for wire in through[-1][1])
    assert all(wire.gain is not None for wire in through[-1][1])
