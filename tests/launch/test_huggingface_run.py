import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.single_process import in_process
from tests.huggingface import CLASSES, VOCAB, section
from tests.ranks import run_ranks
from tests.training import TORCH_2_13, checkpoints, config, share, start, weights
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.trained.export_hf import export
from thinpipe.pipeline.batch import Batch

TOKENS = 9


def batches(*, classes: int | None) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(3):
        inputs_BT = torch.randint(5, VOCAB, (8, TOKENS), generator=generator)
        targets = inputs_BT.roll(-1, 1)
        if classes is not None:
            targets = torch.randint(classes, (8,), generator=generator)
        mask_BT = (torch.arange(TOKENS) < torch.arange(2, 10)[:, None]).long()
        found.append(Batch(inputs_BT, targets, torch.arange(8 * step, 8 * step + 8), mask_BT))
    return found


def run_config(model: dict[str, Any]) -> RunConfig:
    labels = {"text_field": "text", "label_field": "label"} if "classes" in model else {}
    return config(
        model=model,
        run={"folder": f"{model['pretrained']}-run"},
        data={"sequence_length": TOKENS, **labels},
        pipeline={"cuts": (3,)},
        train={"clip_norm": 0},
    )


def _train(rank: int, runs: list[RunConfig]) -> list[tuple[list[float], dict[str, Tensor], int]]:
    """Losses, this rank's weights, and bytes of exchanges."""
    found = []
    for run in runs:
        built = start(run)
        mesh = built.engine.transport.mesh
        totals = [
            built.engine.train_step(share(whole, mesh.dp_rank, mesh.dp_size), step)
            for step, whole in enumerate(batches(classes=run.model.classes))
        ]
        checkpoints(run, built, rank).save(len(totals))
        if rank == 0:
            write_config(run, run.run.path / "config.toml")
        sent = sum(step.sync_bytes for step in totals)
        found.append(([step.loss for step in totals], weights(built), sent))
    return found


def in_one_process(run: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    with in_process(run, total_steps=100) as built:
        losses = [
            built.engine.train_step(whole, step).loss
            for step, whole in enumerate(batches(classes=run.model.classes))
        ]
        return losses, weights(built)


@pytest.mark.dist
def test_ranks_train_what_one_process_does(tmp_path: Path) -> None:
    runs = [run_config(section(name, tmp_path / name)) for name in ("llama", "bert")]
    runs.append(run_config(section("gpt2", tmp_path / "gpt2", tie_embeddings="exact")))
    frozen = [
        run_config(section("gpt2", tmp_path / "gpt2", tie_embeddings=tie, lora={"rank": 2}))
        for tie in ("exact", "untied")
    ]
    frozen = [run.updated(run={"folder": f"{run.run.path}-lora"}) for run in frozen]
    results = run_ranks(2, _train, [*runs, *frozen])
    _check_that_a_frozen_tie_is_not_exchanged(frozen, results)
    for place, run in enumerate(runs[:2]):
        losses, expected = in_one_process(run)
        for rank in range(2):
            assert results[rank][place][0] == losses
            for name, tensor in results[rank][place][1].items():
                assert torch.equal(tensor, expected[name]), name
    embedding = results[0][2][1]["model.transformer.wte.weight"]
    head = results[1][2][1]["model.lm_head.weight"]
    assert torch.equal(embedding, head)
    expected_losses, _ = in_one_process(runs[2])
    for place, run in enumerate(runs):  # from the parts of both ranks
        out = run.run.path.with_name("out")
        export(run.run.path, out, step=None, dtype="source")
        exported = {
            name: tensor
            for file in out.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        shutil.rmtree(out)
        trained = results[0][place][1] | results[1][place][1]
        for name, tensor in trained.items():
            if name != "model.lm_head.weight" or place == 0:  # the exact tie is stored once
                assert torch.equal(exported[name.removeprefix("model.")], tensor), name
    assert results[0][2][0] == pytest.approx(expected_losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.dist
@TORCH_2_13
def test_stages_may_be_held_by_several_ranks(tmp_path: Path) -> None:
    """LoRA, tied weights, classifiers; exported from the parts of all shards."""
    more: dict[str, dict[str, Any]] = {
        "gpt2": {"lora": {"rank": 2}, "activation_checkpointing": True},
        "bert": {},
    }
    runs: dict[str, list[RunConfig]] = {"shards": [], "replicas": []}
    for name, settings in more.items():
        base = run_config(section(name, tmp_path / name, **settings))
        for way, found in runs.items():
            fields = base.model_dump(exclude_none=True)
            fields["pipeline"] |= {way: 2}
            fields["run"]["folder"] = str(tmp_path / f"{name}-{way}")
            found.append(RunConfig.model_validate(fields))
    first, *_ = run_ranks(4, _train, [*runs["shards"], *runs["replicas"]])
    for place, pair in enumerate(zip(*runs.values(), strict=True)):
        assert first[place][0] == first[place + len(more)][0]
        exported = []
        for run in pair:
            out = run.run.path.with_name(f"{run.run.path.name}-out")
            export(run.run.path, out, step=None, dtype="source")
            files = [load_file(file) for file in out.glob("*.safetensors")]
            exported.append({name: t for found in files for name, t in found.items()})
        assert exported[0].keys() == exported[1].keys()
        for name, tensor in exported[0].items():
            assert torch.equal(tensor, exported[1][name]), name


@pytest.mark.parametrize(
    ("name", "more"),
    [("gpt2", {"lora": {"rank": 2}}), pytest.param("bert", {}, marks=pytest.mark.slow)],
)
def test_stages_may_be_spread_over_devices(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    run = run_config(section(name, tmp_path / name, **more))
    base = run.model_dump(exclude_none=True)
    (losses, expected), (found, split) = (
        in_one_process(RunConfig.model_validate({**base, "pipeline": {**pipeline}}))
        for pipeline in (
            {**base["pipeline"], "microbatches": 8, "devices_per_rank": devices}
            for devices in (1, 2)
        )
    )
    assert found == losses
    assert list(split) == list(expected)
    assert all(torch.equal(split[name], tensor) for name, tensor in expected.items())


def _check_that_a_frozen_tie_is_not_exchanged(runs: list[RunConfig], results: Any) -> None:
    """Nor announced as two weights: LoRA trains neither copy."""
    (exact, untied), (head, _) = (of_rank[-2:] for of_rank in results)
    assert exact[0] == untied[0]
    assert exact[2] == untied[2] == 0
    assert not any("separate weights" in notice for notice in runs[1].notices())
    assert torch.equal(exact[1]["model.transformer.wte.weight"], head[1]["model.lm_head.weight"])
    losses, expected = in_one_process(runs[0])
    assert exact[0] == losses
    for name, tensor in (exact[1] | head[1]).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_a_classifier_learns_through_compressed_cuts(tmp_path: Path) -> None:
    base = run_config(section("bert", tmp_path)).model_dump(mode="json", exclude_none=True)
    train = {**base["train"], "lr": 3e-3}
    run = RunConfig.model_validate(
        {**base, "boundary": [{"forward": {"kind": "aqsgd", "bits": 4}}], "train": train}
    )
    (whole, *_) = batches(classes=CLASSES)
    with in_process(run, total_steps=100) as built:
        losses = [built.engine.train_step(whole, step).loss for step in range(25)]
    assert losses[0] == pytest.approx(1.1, abs=0.3)
    assert losses[-1] < 0.5 * losses[0]
