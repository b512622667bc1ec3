"""A stage's memory is counted without building it, and equals what the built one keeps."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tests.invoking import said
from tests.training import SCHEDULES, TORCH_2_13, config
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.cuts.profile import _Bench
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.memory.host import (
    added_nbytes,
    check_gpu,
    check_host,
    device_nbytes,
    gpu_nbytes,
    host_needs,
)
from thinpipe.launch.memory.microbatches import in_flight
from thinpipe.launch.memory.model import BlockRun, ModelMemory, block_memory, rank_memory
from thinpipe.pipeline.wire.told import ScheduleName


def run_config(**model: Any) -> RunConfig:
    shape = {"layers": 4, "width": 32, "heads": 2, "context": 16} | model
    return config(model=shape, pipeline={"cuts": [1, 3], "microbatches": 2})


def kept_nbytes(bench: _Bench) -> int:
    """Bytes of distinct storages that one microbatch keeps for its backward, and its input."""
    own = {p.untyped_storage().data_ptr() for p in bench._block.parameters()}
    kept = {bench._x.untyped_storage().data_ptr(): bench._x.nbytes}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = bench._forward()
    del output
    return sum(kept.values())


@pytest.mark.parametrize(
    "model", [{}, {"width": 48, "heads": 4}, {"dropout": 0.1}, {"activation_checkpointing": True}]
)
def test_counted_bytes_are_those_that_real_blocks_keep(model: dict[str, Any]) -> None:
    run = run_config(**model)
    bounds = (0, 1, 3, 4)
    for stage, counted in enumerate(rank_memory(run)):
        benches = [_Bench(run, block) for block in range(bounds[stage], bounds[stage + 1])]
        numel = sum(p.numel() for bench in benches for p in bench._block.parameters())
        logits = counted.loss // 4  # which torch holds; then log-softmax, and a gradient of each
        kept = logits + sum(map(kept_nbytes, benches))
        assert counted.activations == in_flight(run)[stage] * kept
        state = counted.weights + counted.gradients + counted.optimizer
        assert state == 4 * 4 * numel
        again = rank_memory(run_config(**(model | {"activation_checkpointing": False})))[stage]
        checkpointed = "activation_checkpointing" in model
        assert counted.activations <= again.activations
        assert counted.transient >= again.transient
        if stage < 2:  # the last one has gradients of logits
            assert (counted.transient > 0) == checkpointed


def test_blocks_of_a_deep_model_are_counted_by_kind() -> None:
    deep, deeper = run_config(layers=64), run_config(layers=1000)
    block = (rank_memory(deep)[2].weights - rank_memory(run_config())[2].weights) / 60
    grown = rank_memory(deeper)[2].weights - rank_memory(deep)[2].weights
    assert grown == pytest.approx(936 * block)


@pytest.mark.parametrize("layers", [8, 80])
def test_every_nth_block_computed_again_keeps_what_the_others_do(layers: int) -> None:
    kept = []
    for every in (False, 4, 1):
        blocks = block_memory(run_config(layers=layers, activation_checkpointing=every))
        kept.append(sum(block.activations * count for block, count in blocks))
    inner = (kept[0] - kept[2]) / layers  # the last block is not recomputed, and its head neither
    assert kept[1] == pytest.approx(kept[0] - inner * layers / 4, rel=0.01)


def test_what_does_not_fit_is_rejected_before_anything_is_built(tmp_path: Path) -> None:
    for shape in ({"layers": 10**9}, {"width": 2**17, "layers": 16}):
        run = run_config(**shape)
        with pytest.raises(ConfigError, match=r"the 3 ranks on this host do not fit: RAM .* free"):
            check_host(run, 8, range(3))
        write_config(run, tmp_path / "run.toml")
        assert "TB of" in said("train", tmp_path / "run.toml", "--dry-run", code=2)
    assert host_needs(run_config(), 8, range(3)).total < 10**9


def test_a_dry_run_prints_the_notes_of_a_start(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    data = DataConfig(path=str(tmp_path / "binary"), sequence_length=16)
    write_config(run_config().model_copy(update={"data": data}), tmp_path / "run.toml")
    options = ("--dry-run", "--set", "data.train_sequences=8", "--set", "data.eval_sequences=4")
    output = said("train", tmp_path / "run.toml", *options)
    assert "is not UTF-8 text; it is read as plain bytes" in output


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_keeps_the_activations_of_what_is_in_flight(schedule: ScheduleName) -> None:
    single = schedule in ("GPipe", "1F1B", "Deep1F1B")
    cuts = [1, 3] if single else [1, 2, 3]
    run = config(pipeline={"schedule": schedule, "microbatches": 4, "cuts": cuts})
    expected = {
        "GPipe": [4, 4, 4],
        "1F1B": [3, 2, 1],
        "Deep1F1B": [4, 4, 1],
        "LoopedBFS": [4, 4, 4, 4],
    }
    held = in_flight(run)
    assert held == expected.get(schedule, held)
    assert all(1 <= count <= 4 for count in held)
    block = ModelMemory.of(80, 5, 7)
    bounds = pairwise((0, *cuts, 4))
    by_stage = [
        (b - a) * (4 * 20 + 12 * 5 + 7 * count) for (a, b), count in zip(bounds, held, strict=True)
    ]
    by_rank = [0] * run.pipeline.pipeline_ranks
    for stage, rank in run.stage_ranks.items():
        by_rank[rank] += by_stage[stage]
    assert [memory.total for memory in rank_memory(run, [BlockRun(block, 4)])] == by_rank


def test_what_blocks_add_to_a_stage_makes_up_what_it_needs() -> None:
    """The parts that `cuts = "auto"` divides, for the host's whole account."""
    run = run_config(activation_checkpointing=True)
    blocks = block_memory(run)
    added, without = added_nbytes(run, 8, blocks, None)
    bounds = ((0, 1), (1, 3), (3, 4))
    for stage, needed in enumerate(device_nbytes(run, 8)):
        parts = without[stage] + sum(added[stage][slice(*bounds[stage])])
        largest = max(block.transient for block, _ in blocks)
        assert needed <= parts + 4 <= needed + 1.2 * largest + 8
        assert needed == host_needs(run, 8, [stage]).total


@TORCH_2_13
def test_shards_divide_what_they_keep_and_hold_what_is_under_way() -> None:
    def memory(shards: int, gather: str) -> Any:
        pipeline = {"cuts": [], "microbatches": 2, "shards": shards}
        return rank_memory(config(pipeline=pipeline, shards={"gather": gather}))[0]

    whole = memory(1, "step")
    for gather in ("step", "microbatch"):
        two, four = memory(2, gather), memory(4, gather)
        assert two.optimizer == whole.optimizer // 2
        assert two.saved == whole.saved // 2  # what others sent is not
        assert two.gathered == four.gathered
        assert two.gathered == whole.weights if gather == "step" else two.gathered > 0
        assert two.gradients - whole.gradients // 2 == (gather == "step") * whole.gradients
    heaviest = max(block.weights for block, _ in block_memory(config(pipeline={"cuts": []})))
    assert memory(2, "microbatch").gathered == 7 * heaviest


@TORCH_2_13
def test_shards_that_send_differences_hold_all_weights_once_more_and_save_their_part() -> None:
    pipeline = {"cuts": [], "microbatches": 2, "shards": 2}
    values: dict[str, Any] = {"method": "qsdp"}
    plain, remembers = (
        rank_memory(config(pipeline=pipeline, shards=shards))[0]
        for shards in (values, {**values, "weights": "differences"})
    )
    assert remembers.total - plain.total == 2 * plain.weights
    assert remembers.saved - plain.saved == plain.weights


@pytest.mark.parametrize(
    ("method", "words"), [("allreduce", 0), ("cocktail", 1.5), ("diloco", 2), ("demo", 3)]
)
def test_replicas_count_what_they_keep_to_exchange(method: str, words: float) -> None:
    """cocktail: a global copy, and a server's error for its half of it; diloco: a global copy and a
    momentum; demo: a momentum, and what two steps send. What is copied of the buckets under way
    takes 12 bytes a gradient.
    """
    pipeline = {"cuts": [2], "microbatches": 2, "replicas": 2}
    alone, together = (
        rank_memory(config(pipeline=pipeline, gradcomp={"method": name}))
        for name in ("none", method)
    )
    for one, replica in zip(alone, together, strict=True):
        assert replica.exchange == pytest.approx(words * one.weights, rel=0.02)
        assert replica.saved == one.saved + replica.exchange
        in_buckets = 0 if method == "demo" else 12 * one.trained
        assert replica.total == one.total + replica.exchange + one.weights + in_buckets


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_of_hugging_face_models_are_counted_as_they_are(
    tmp_path: Path, precision: str
) -> None:
    folder = tmp_path / "llama"
    LlamaConfig(
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        max_position_embeddings=64,
    ).save_pretrained(folder)
    run = RunConfig.model_validate(
        {
            "model": {"config": str(folder)},
            "data": {"sequence_length": 64},
            "pipeline": {"cuts": [1], "microbatches": 2, "precision": precision, "device": "cpu"},
            "train": {"batch_size": 8},
        }
    )
    first, second = rank_memory(run)
    for counted, blocks, stage in ((first, [0], 0), (second, [1, 2], 1)):
        kept = sum(kept_nbytes(_Bench(run, block)) for block in blocks)
        kept += counted.loss // (4 if precision == "fp32" else 7)  # logits, of all that it takes
        held = in_flight(run)[stage]
        assert counted.activations + held * counted.casts == pytest.approx(held * kept, rel=0.1)
        assert (counted.casts > 0) == (precision == "bf16")


def test_what_lies_in_ram_is_not_counted_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpipe.launch.memory.host.device_type", lambda _: "cuda")
    run = run_config()
    pipeline = run.pipeline.model_copy(update={"device": "cuda", "offload": True})
    offloaded = run.model_copy(update={"pipeline": pipeline})
    for position, (before, now) in enumerate(zip(*map(rank_memory, (run, offloaded)), strict=True)):
        assert now.optimizer == before.optimizer > 0
        at_once = now.transient - before.transient
        assert 0 < at_once < before.activations + before.optimizer
        moved = before.activations + before.optimizer - at_once
        on_gpu = [device_nbytes(each, 0)[position] for each in (run, offloaded)]
        assert on_gpu[0] - on_gpu[1] == pytest.approx(1.2 * moved, abs=2)
        in_ram = [host_needs(each, 0, [position]).total for each in (run, offloaded)]
        assert in_ram[1] - in_ram[0] == before.activations + before.optimizer


def test_what_does_not_fit_on_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config()
    run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"device": "cuda"})})
    monkeypatch.setattr("thinpipe.launch.memory.host.gpu_count", lambda: 2)
    monkeypatch.setattr("thinpipe.launch.memory.host.free_gpu_memory", lambda per_rank: 10**5)
    each = device_nbytes(run, 8)
    assert gpu_nbytes(run, 8, range(3)) == max(each[0] + each[2], each[1])
    wide = run.pipeline.model_copy(update={"devices_per_rank": 2})
    halves = run.model_copy(update={"pipeline": wide})
    assert gpu_nbytes(halves, 8, range(3)) == sum(nbytes // 2 for nbytes in each)
    with pytest.raises(ConfigError, match=r"rank 1 on this host need .* and 100 kB are free"):
        check_gpu(run, 8, range(3), local_rank=1)
    both = each[0] + each[2]
    monkeypatch.setattr("thinpipe.launch.memory.host.free_gpu_memory", lambda per_rank: both - 1)
    assert max(each) < both - 1  # any of them fits alone
    check_gpu(run, 8, range(3), local_rank=1)
    for sharing in (0, 2):
        with pytest.raises(ConfigError, match=r"ranks 0, 2 on this host need"):
            check_gpu(run, 8, range(3), local_rank=sharing)
    monkeypatch.setattr("thinpipe.launch.memory.host.free_gpu_memory", lambda per_rank: 10**9)
    check_gpu(run, 8, range(3), local_rank=0)
    assert host_needs(run, 8, range(3)).copies > 0  # a checkpoint goes through RAM
