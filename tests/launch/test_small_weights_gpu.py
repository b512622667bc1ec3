"""Weights of few bytes on a GPU: they train as on a CPU, lie in RAM alike, and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.checkpoint.test_base import resumed, step, trained_and_saved
from tests.launch.test_frozen_weights import bf16_run
from tests.launch.test_trained_bf16 import losses_of, narrow_run
from tests.training import weights
from thinpipe.launch.config.run import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FORMATS = ["trained in bf16", "LoRA on bf16", "LoRA on int8", "LoRA on nf4"]


def run_of(form: str, folder: Path, **pipeline: Any) -> RunConfig:
    """Three stages of a small Llama."""
    if form == "trained in bf16":
        pytest.importorskip("optimi")
        return narrow_run(folder, [2, 4], pipeline=pipeline)
    if "bf16" not in form:
        pytest.importorskip("bitsandbytes")
    run = bf16_run(folder, [2, 4], weights=form.split()[-1])
    return run.updated(pipeline={**run.pipeline.model_dump(exclude_none=True), **pipeline})


@pytest.mark.parametrize("form", FORMATS)
def test_they_train_as_on_a_cpu(form: str, tmp_path: Path) -> None:
    card, cpu = (losses_of(run_of(form, tmp_path, device=name), 6) for name in ("cuda", "cpu"))
    assert card == pytest.approx(cpu, abs=0.03)
    assert min(card) < card[0]


@pytest.mark.parametrize("form", FORMATS)
def test_what_lies_in_ram_trains_the_same_bits(form: str, tmp_path: Path) -> None:
    runs = [run_of(form, tmp_path, device="cuda", offload=offload) for offload in (False, True)]
    held, moved = (losses_of(run, 6) for run in runs)
    assert held == moved


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_resumes_bit_for_bit(form: str, tmp_path: Path) -> None:
    run = run_of(form, tmp_path, device="cuda")
    losses, after = trained_and_saved(run)
    with resumed(run) as built:
        assert [step(built, number) for number in (2, 3)] == losses
        for name, tensor in weights(built).items():
            assert name not in after or torch.equal(tensor, after[name]), name
