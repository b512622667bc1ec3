"""The examples that need a download, in the small form that needs none."""

import math
import os
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import share, start
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.corpus import check_data
from thinpipe.pipeline.batch import Batch

ROOT = Path(__file__).parents[2]
EXAMPLES = ("gpt2_wikitext", "bert_cola", "gptjt")
STEPS = 3


def _small(name: str, *overrides: str) -> RunConfig:
    return load_config(ROOT / f"examples/{name}_small.toml", overrides)


def _first_batch(run: RunConfig) -> Batch:
    return check_data(run).train.batch(range(run.train.batch_size))


def _train(rank: int) -> list[list[float]]:
    os.chdir(ROOT)
    found = []
    for name in EXAMPLES:
        run = _small(name, "train.warmup_steps=0", "gradcomp.cocktail.warmup_steps=1")
        built = start(run)
        replica = built.engine.transport.mesh.replica
        batch = share(_first_batch(run), replica, run.pipeline.replicas)
        found.append([built.engine.train_step(batch, step).loss for step in range(STEPS)])
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_small_examples_train() -> None:
    found = run_ranks(4, _train)
    chance = (math.log(257), math.log(2), math.log(257))
    for place, expected in enumerate(chance):
        first, *_, last = losses = found[0][place]
        assert first == pytest.approx(expected, rel=0.05)
        assert last < first
        assert all(math.isfinite(loss) for loss in losses)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_small_examples_differ_in_size_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    small = _small(name)
    real = load_config(ROOT / f"examples/{name}.toml", [f'model.config="{small.model.config}"'])
    for section in ("model", "boundary", "gradcomp", "memory", "checkpoint"):
        assert getattr(small, section) == getattr(real, section), section
    assert small.pipeline.model_copy(update={"replicas": real.pipeline.replicas}) == real.pipeline
    assert small.data.kind == real.data.kind
    assert (small.data.objective, small.data.packing) == (real.data.objective, real.data.packing)


def test_gptjt_packs_a_mixture_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = _small("gptjt")
    batch = _first_batch(run)
    assert run.method == "cocktail"
    assert len(run.data.sources) > 1
    assert batch.prefix_BT is not None
    assert batch.segments_BT is not None
    assert batch.segments_BT.amax(dim=1).min() > 1
    assert torch.equal(
        batch.prefix_BT & (batch.segments_BT == 0), torch.zeros_like(batch.prefix_BT)
    )
