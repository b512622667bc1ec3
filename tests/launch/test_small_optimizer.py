"""AdamW with moments of 8 bits: its steps, its state in checkpoints, other cuts, what it bars."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.launch.checkpoint.test_base import resumed, step
from tests.ranks import run_ranks
from tests.training import batch, checkpoints, config, train_steps, weights
from thinpipe.gradcomp.registry import load_method
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.memory.model import rank_memory
from thinpipe.launch.optimizer import check_optimizer

SHAPE = {"layers": 4, "width": 64, "heads": 2, "context": 12}


def run_config(folder: Path, cuts: list[int], **train: Any) -> RunConfig:
    return config(
        run={"folder": str(folder)},
        model=SHAPE,
        pipeline={"cuts": cuts, "microbatches": 2},
        train={"batch_size": 4, "lr": 0.002, "optimizer": "adamw8bit", **train},
    )


@pytest.mark.slow
def test_it_learns_as_adamw_does_with_a_third_of_its_state(tmp_path: Path) -> None:
    found: dict[str, tuple[list[float], int]] = {}
    for name in ("adamw", "adamw8bit"):
        with in_process(run_config(tmp_path, [2], optimizer=name), total_steps=9) as built:
            losses = [step(built, number % 2) for number in range(12)]
            state = built.optimizer.state
            nbytes = sum(
                value.nbytes
                for parameter in state.values()
                for key, value in parameter.items()
                if isinstance(value, torch.Tensor) and not key.startswith("qmap")
            )
            found[name] = losses, nbytes
    (exact, whole), (small, less) = found["adamw"], found["adamw8bit"]
    assert small != exact
    assert small == pytest.approx(exact, abs=0.05)
    assert exact[-1] < exact[0] - 0.5
    assert less < whole / 3
    for name, held in (("adamw", whole), ("adamw8bit", less)):
        counted = rank_memory(run_config(tmp_path, [2], optimizer=name))
        steps = 4 * len(state)  # a number per parameter that torch keeps too
        assert sum(own.optimizer for own in counted) == held - steps * (name == "adamw")


@pytest.mark.parametrize("optimizer", ["adamw8bit", "torch.optim:Adafactor"])
def test_it_resumes_bit_for_bit_also_with_other_cuts(optimizer: str, tmp_path: Path) -> None:
    run = run_config(tmp_path, [1, 3], optimizer=optimizer)
    with in_process(run, total_steps=9) as built:
        for number in (0, 1):
            step(built, number)
        checkpoints(run, built).save(2)
        losses = [step(built, number) for number in (2, 3)]
        after = weights(built)
    for cuts in ([1, 3], []):
        with resumed(run_config(tmp_path, cuts, optimizer=optimizer)) as built:
            assert [step(built, number) for number in (2, 3)] == losses, cuts
            for name, tensor in weights(built).items():
                assert torch.equal(tensor, after[name]), name


def test_what_it_cannot_do_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config(tmp_path, [2])
    check_optimizer(run.train, run.method, in_bf16=False)
    with pytest.raises(ValueError, match=r'method = "qadam" brings its own optimizer along'):
        check_optimizer(run.train, "qadam", in_bf16=False)
    with pytest.raises(ValueError, match=r'train.optimizer = "adamw8bit" may need whole matrices'):
        run.updated(pipeline={**run.pipeline.model_dump(exclude_none=True), "shards": 2})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r'pip install "thinpipe\[quantized\]"; or use "adamw"'):
        check_optimizer(run.train, run.method, in_bf16=False)


def _train(rank: int, runs: list[RunConfig]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    samples = [batch([4 * number + i for i in range(4)]) for number in range(4)]
    return [train_steps(rank, run, samples)[:2] for run in runs]


@pytest.mark.slow
@pytest.mark.dist
def test_exchanges_work_with_it(tmp_path: Path) -> None:
    methods = ("allreduce", "cocktail")
    runs = [
        run_config(tmp_path, [], optimizer=optimizer).updated(
            pipeline={"cuts": [], "microbatches": 2, "replicas": 2, "device": "cpu"},
            gradcomp={"method": method},
        )
        for method in methods
        for optimizer in ("adamw8bit", "adamw")
    ]
    first, second = run_ranks(2, _train, runs)
    for place, method in enumerate(methods):
        (losses, own), (exact, _) = first[2 * place : 2 * place + 2]
        others, other = second[2 * place]
        assert losses == others
        assert losses != exact
        assert losses == pytest.approx(exact, abs=0.05)
        equal = all(torch.equal(tensor, other[name]) for name, tensor in own.items())
        assert equal == load_method(method).REPLICAS_EQUAL
