"""Weights trained in bf16: small steps count, checkpoints, other cuts, export, what they bar."""

import importlib.util
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.single_process import in_process
from tests.huggingface import section
from tests.launch.checkpoint.test_base import resumed, step, trained_and_saved
from tests.often import mostly_slow
from tests.ranks import run_ranks
from tests.training import batch, config, train_steps, weights
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts import profile
from thinpipe.launch.cuts.profile import typical_block_s
from thinpipe.launch.memory.model import rank_memory
from thinpipe.launch.optimizer import check_optimizer, make_optimizer
from thinpipe.launch.trained.export_hf import export
from thinpipe.launch.trained.model import load

KEEPS_STEPS: dict[str, Any] = {"betas": [0.9, 0.99], "weight_decay": 0}


def narrow_run(
    folder: Path, cuts: list[int], name: str = "llama", form: str = "bf16", **sections: Any
) -> RunConfig:
    more = {"tie_embeddings": "exact"} if name == "llama-tied" and cuts else {}
    pipeline = {"cuts": cuts, "microbatches": 2, "precision": "bf16"}
    train = {"batch_size": 4, "lr": 0.01, **KEEPS_STEPS}
    return config(
        run={"folder": str(folder / "run")},
        model=section(name, folder / "source", weights=form, **more),
        pipeline={**pipeline, **sections.pop("pipeline", {})},
        train={**train, **sections.pop("train", {})},
        **sections,
    )


def losses_of(run: RunConfig, steps: int) -> list[float]:
    with in_process(run, total_steps=steps) as built:
        return [step(built, number % 3) for number in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "llama-tied", "gpt2", "mixtral"], "llama-tied".__eq__)
)
def test_it_learns_as_fp32_does_with_less_memory(name: str, tmp_path: Path) -> None:
    narrow, wide = (narrow_run(tmp_path, [2, 4], name, form) for form in ("bf16", "fp32"))
    losses, expected = losses_of(narrow, 12), losses_of(wide, 12)
    assert losses != expected
    assert losses[0] == pytest.approx(expected[0], abs=0.01)
    assert fmean(losses[6:]) < losses[0] - 0.3
    if name != "mixtral":  # where a last bit may choose another expert, and so another course
        assert losses == pytest.approx(expected, abs=0.06)
    assert expected[-1] < expected[0] - 0.5
    for less, more in zip(rank_memory(narrow), rank_memory(wide), strict=True):
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(less, part) < getattr(more, part)


def test_steps_far_below_a_weights_rounding_add_up(tmp_path: Path) -> None:
    run = narrow_run(tmp_path, [])
    train = run.train.model_copy(update={"lr": 1e-5, "weight_decay": 0.0})
    for make, expected in (
        (lambda p: make_optimizer(train, {"w": p}, in_bf16=True), 255),
        (lambda p: torch.optim.AdamW([p], lr=train.lr, weight_decay=0.0), 256),
    ):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = make(weight)
        for _ in range(300):  # below 1 the next number is 1 / 256 less
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert (256 * weight).unique().tolist() == [expected]


def test_what_is_counted_is_held(tmp_path: Path) -> None:
    run = narrow_run(tmp_path, [])
    with in_process(run, total_steps=9) as built:
        step(built, 0)
        parameters = weights(built)
        assert {p.dtype for n, p in parameters.items() if "_proj" in n} == {torch.bfloat16}
        assert {p.dtype for n, p in parameters.items() if "norm" in n or "embed" in n} == {
            torch.float32
        }
        state = [
            value.nbytes
            for parameter in built.optimizer.state.values()
            for key, value in parameter.items()
            if isinstance(value, torch.Tensor) and key != "step"
        ]
        (counted,) = rank_memory(run)
        assert sum(state) == counted.optimizer
        assert sum(p.nbytes for p in parameters.values()) == counted.weights == counted.gradients


@pytest.mark.parametrize("name", mostly_slow(["llama", "llama-tied"], "llama".__eq__))
def test_a_run_resumes_bit_for_bit_also_with_other_cuts(name: str, tmp_path: Path) -> None:
    run = narrow_run(tmp_path, [2, 4], name)
    losses, after = trained_and_saved(run)
    for cuts in ([2, 4], [3]) if name == "llama-tied" else ([2, 4], []):  # that needs two stages
        with resumed(narrow_run(tmp_path, cuts, name)) as built:
            assert [step(built, number) for number in (2, 3)] == losses, cuts
            for key, tensor in weights(built).items():
                assert torch.equal(tensor, after[key]), key


def test_exports_and_loads_what_was_trained(tmp_path: Path) -> None:
    run = narrow_run(tmp_path, [3])
    trained_and_saved(run)
    with resumed(run) as built:
        held = weights(built)
    loaded = load(run.run.path).state_dict()
    export(run.run.path, tmp_path / "out", step=None, dtype="source")
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    stored = {name: tensor for file in files for name, tensor in file.items()}
    assert len(stored) > 20
    for name, tensor in stored.items():
        assert tensor.dtype == torch.float32, name  # as in the files it began with
        assert torch.equal(tensor, loaded[name].float()), name
        assert torch.equal(tensor, held[f"model.{name}"].float()), name


def _train(rank: int, runs: list[RunConfig]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    samples = [batch([4 * number + i for i in range(4)]) for number in range(3)]
    return [train_steps(rank, run, samples)[:2] for run in runs]


@pytest.mark.slow
@pytest.mark.dist
def test_replicas_stay_equal(tmp_path: Path) -> None:
    runs = [
        narrow_run(tmp_path, [], pipeline={"replicas": 2}, gradcomp={"method": method})
        for method in ("allreduce", "ef_gradients")
    ]
    first, second = run_ranks(2, _train, runs)
    for (losses, own), (others, other) in zip(first, second, strict=True):
        assert losses == others
        assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"betas": [0.9, 0.999]}}, "train.betas = [0.9, 0.999]: above 0.99"),
        ({"train": {"betas": [0.999, 0.9]}}, "train.betas = [0.999, 0.9]: above 0.99"),
        ({"train": {"weight_decay": 0.1}}, "train.weight_decay = 0.1: times the learning rate"),
        ({"gradcomp": {"method": "demo"}}, 'gradcomp.method = "demo": moves weights in a way'),
        ({"train": {"optimizer": "muon"}}, 'train.optimizer = "muon": would lose steps'),
        ({"train": {"optimizer": "torch.optim:AdamW"}}, "would lose steps of less than 1/256 of"),
        (
            {"pipeline": {"replicas": 2}, "gradcomp": {"method": "cocktail"}},
            'gradcomp.method = "cocktail": moves weights in a way of its own',
        ),
        (
            {"pipeline": {"replicas": 2}, "gradcomp": {"method": "qadam"}},
            'gradcomp.method = "qadam": moves weights in a way of its own',
        ),
        ({"pipeline": {"precision": "fp32"}}, "such weights are multiplied in bf16; set"),
        ({"pipeline": {"shards": 2}}, "shards exchange weights in fp32"),
    ],
)
def test_what_would_lose_small_steps_is_rejected(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    narrow_run(tmp_path, [2], gradcomp={"method": "cocktail"})  # without replicas it does nothing
    with pytest.raises(ValueError, match=re.escape(message)):
        narrow_run(tmp_path, [2], **sections)


def test_the_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = narrow_run(tmp_path, [2])
    check_optimizer(run.train, run.method, in_bf16=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    message = 'model.weights = "bf16": needs optimi: pip install "thinpipe[bf16]"; or leave it out'
    with pytest.raises(ValueError, match=re.escape(message)):
        check_optimizer(run.train, run.method, in_bf16=True)


@pytest.mark.slow
def test_the_time_of_an_update_is_that_of_the_runs_own_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_LEAST_S", 0.0)
    monkeypatch.setattr(profile, "_MOST_S", 0.0)
    used = set()
    counted = register_optimizer_step_post_hook(lambda optimizer, *_: used.add(type(optimizer)))
    try:
        typical_block_s(narrow_run(tmp_path, [2]))
        assert {kind.__module__.partition(".")[0] for kind in used} >= {"optimi"}
        used.clear()
        typical_block_s(config(train={"optimizer": "muon"}))
        assert torch.optim.Muon in used
        used.clear()
        typical_block_s(config(train={"optimizer": "tests.launch.test_optimizer:none_such"}))
        assert [kind.__name__ for kind in used] == ["AdamW"]  # nobody knows what it makes of one
    finally:
        counted.remove()
