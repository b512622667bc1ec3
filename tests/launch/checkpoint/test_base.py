"""What LoRA freezes stays in the model's files: checkpoints hold what is trained."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.single_process import in_process
from tests.huggingface import saved_model, section
from tests.ranks import run_ranks
from tests.training import (
    TOKENS,
    TORCH_2_13,
    batch,
    checkpoints,
    config,
    restore,
    share,
    start,
    weights,
)
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.memory.model import rank_memory
from thinpipe.launch.trained.model import load, read_trained, start_from_run
from thinpipe.pipeline.batch import Batch

Q_PROJ = "model.layers.3.self_attn.q_proj.weight"


def lora_run(
    folder: Path, cuts: list[int], name: str = "llama", *, pipeline: Any = None, **model: Any
) -> RunConfig:
    labels = {"text_field": "text", "label_field": "label"} if name == "bert" else {}
    return config(
        run={"folder": str(folder / "run")},
        model=section(name, folder / "source", **{"lora": {"rank": 2}, **model}),
        data={"sequence_length": TOKENS, **labels},
        pipeline={"cuts": cuts, "microbatches": 2, **(pipeline or {})},
        train={"batch_size": 4, "lr": 0.01},
    )


@contextmanager
def resumed(run: RunConfig) -> Iterator[Built]:
    with in_process(run, total_steps=9) as built:
        assert restore(checkpoints(run, built)) == 2
        yield built


def step(built: Built, number: int, classes: int | None = None) -> float:
    samples = batch([4 * number + sample for sample in range(4)])
    if classes is not None:
        labels_B = torch.arange(4) % classes
        samples = Batch(samples.inputs_BT, labels_B, samples.ids_B)
    return built.engine.train_step(samples, number).loss


def trained_and_saved(run: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, saved; the losses and weights of two more."""
    with in_process(run, total_steps=9) as built:
        for number in (0, 1):
            step(built, number, run.model.classes)
        checkpoints(run, built).save(2)
        write_config(run, run.run.path / "config.toml")
        return [step(built, number, run.model.classes) for number in (2, 3)], weights(built)


def saved_names(run: RunConfig) -> dict[str, int]:
    """Bytes of the tensors of a checkpoint that are weights, by name."""
    (part,) = (run.run.path / "checkpoints" / "step-2").glob("*.safetensors")
    return {
        name.rpartition("[")[2].strip("]'"): tensor.nbytes
        for name, tensor in load_file(part).items()
        if name.startswith("state['model']")
    }


def test_a_checkpoint_holds_adapters_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = saved_model("llama-tied", tmp_path / "source")
    run = lora_run(tmp_path, [2, 4], "llama-tied")
    losses, after = trained_and_saved(run)
    names = saved_names(run)
    assert names
    assert all(".lora_" in name for name in names)
    saved = next((run.run.path / "checkpoints").glob("step-2/*.safetensors")).stat().st_size
    assert saved < sum(p.nbytes for p in whole.parameters()) / 2
    counted = sum(own.saved for own in rank_memory(run))
    assert counted == 3 * sum(names.values())  # with Adam's moments
    for cuts in ([2, 4], []):
        with resumed(lora_run(tmp_path, cuts, "llama-tied")) as built:
            assert [step(built, number) for number in (2, 3)] == losses, cuts
            found = weights(built)
            assert all(torch.equal(tensor, after[name]) for name, tensor in found.items())


def test_a_changed_base_is_rejected_by_its_digest(tmp_path: Path) -> None:
    run = lora_run(tmp_path, [3])
    trained_and_saved(run)
    new = lora_run(tmp_path, [3], from_run=str(run.run.path))
    new = new.updated(run={"folder": str(tmp_path / "new")})
    load(run.run.path)
    plain = new.updated(model=section("llama", tmp_path / "source", from_run=str(run.run.path)))
    with (
        in_process(plain, total_steps=9) as built,
        pytest.raises(CheckpointError, match=r"only that one has adapters .* `thinpipe export`"),
    ):
        start_from_run(built, plain)
    for file in (tmp_path / "source").glob("*.safetensors"):
        tensors = load_file(file)
        if Q_PROJ in tensors:
            tensors[Q_PROJ][1, 1] += 1e-3
            save_file(tensors, file, {"format": "pt"})
    message = r"layers\.3\.self_attn\.q_proj\.base_layer\.weight had another digest"
    for cuts in ([3], [2]):
        with pytest.raises(CheckpointError, match=message), resumed(lora_run(tmp_path, cuts)):
            pass
    with pytest.raises(CheckpointError, match=message):
        load(run.run.path)
    with in_process(new, total_steps=9) as built, pytest.raises(CheckpointError, match=message):
        start_from_run(built, new)


def test_what_no_file_holds_is_saved(tmp_path: Path) -> None:
    """A pooler that starts random is frozen, and would be another one after the next start."""
    whole = saved_model("bert", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors.index.json").unlink()
    for file in (tmp_path / "source").glob("model-*.safetensors"):
        file.unlink()
    base = {name: t for name, t in whole.state_dict().items() if ".encoder." in name or
            ".embeddings." in name}  # fmt: skip
    save_file(base, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    run = lora_run(tmp_path, [3], "bert")
    losses, _ = trained_and_saved(run)
    names = saved_names(run)
    assert {"model.bert.pooler.dense.weight", "model.classifier.weight"} < names.keys()
    assert not any(name.endswith("base_layer.weight") for name in names)
    with resumed(run) as built:
        assert [step(built, n, run.model.classes) for n in (2, 3)] == losses
    saved_model("llama", tmp_path / "config")
    random = lora_run(tmp_path, [3], "llama", config=str(tmp_path / "config"))
    assert not random.model.reads_frozen
    (tmp_path / "run").rename(tmp_path / "bert")
    trained_and_saved(random)
    assert "model.model.norm.weight" in saved_names(random)


def _sharded(rank: int, run: RunConfig, resume: bool) -> Mapping[str, Any]:
    built = start(run)
    mesh, saves = built.engine.transport.mesh, checkpoints(run, built, rank)
    own = [share(batch([4 * n + i for i in range(4)]), mesh.dp_rank, mesh.dp_size) for n in (0, 1)]
    if resume:
        restore(saves)
        held = sum(t.numel() for t in module_of(built.stages[0]).state_dict().values())
        return {"loss": built.engine.train_step(own[1], 1).loss, "held": held}
    built.engine.train_step(own[0], 0)
    saves.save(1)
    if rank == 0:
        write_config(run, run.run.path / "config.toml")
    return {"loss": built.engine.train_step(own[1], 1).loss}


@pytest.mark.dist
@pytest.mark.slow
@TORCH_2_13
def test_shards_of_a_stage_save_adapters_too(tmp_path: Path) -> None:
    run = lora_run(tmp_path, [3])
    sharded = lora_run(tmp_path, [3], pipeline={"shards": 2})
    saved = run_ranks(4, _sharded, sharded, False)
    trained = read_trained(run.run.path)
    assert all(".lora_" in name for name in trained.tensors)
    for again in (sharded, run):
        found = run_ranks(again.world_size, _sharded, again, True)
        assert [result["loss"] for result in found] == pytest.approx(
            [result["loss"] for result in saved[: again.world_size]], rel=1e-6
        )
