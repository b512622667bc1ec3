"""A stage's memory is counted without building it, and equals what the built one keeps."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from tests.training import config
from thinpipe.launch.cli import app
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.memory.check import check_host, host_needs
from thinpipe.launch.memory.model import rank_memory
from thinpipe.launch.plan.predict import in_flight
from thinpipe.launch.plan.profile import _Bench, training_nbytes


def run_config(**model: Any) -> RunConfig:
    shape = {"layers": 4, "width": 32, "heads": 2, "context": 16} | model
    return config(model=shape, pipeline={"cuts": [1, 3], "microbatches": 2})


@pytest.mark.parametrize(
    "model",
    [{}, {"width": 48, "heads": 4}, {"dropout": 0.1}, {"activation_checkpointing": True}],
)
def test_counted_bytes_are_those_that_real_blocks_keep(model: dict[str, Any]) -> None:
    run = run_config(**model)
    bounds = (0, 1, 3, 4)
    for stage, counted in enumerate(rank_memory(run)):
        benches = [_Bench(run, block) for block in range(bounds[stage], bounds[stage + 1])]
        numel = sum(parameter.numel() for bench in benches for parameter in bench._parameters)
        kept = sum(bench._activations() for bench in benches)
        assert counted.activations == in_flight(run, stage) * kept
        state = counted.weights + counted.gradients + counted.optimizer
        assert state == training_nbytes(numel, numel)
        again = rank_memory(run_config(**(model | {"activation_checkpointing": False})))[stage]
        checkpointed = "activation_checkpointing" in model
        assert counted.activations <= again.activations
        assert (counted.recomputed > 0) == checkpointed


def test_blocks_of_a_deep_model_are_counted_by_kind() -> None:
    deep, deeper = run_config(layers=64), run_config(layers=1000)
    block = (rank_memory(deep)[2].weights - rank_memory(run_config())[2].weights) / 60
    grown = rank_memory(deeper)[2].weights - rank_memory(deep)[2].weights
    assert grown == pytest.approx(936 * block)


def test_what_does_not_fit_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    for shape in ({"layers": 10**9}, {"width": 2**17, "layers": 16}):
        run = run_config(**shape)
        with pytest.raises(ConfigError, match=r"the 3 ranks on this host do not fit: RAM .* free"):
            check_host(run, 8, range(3))
        write_config(run, tmp_path / "run.toml")
        shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--dry-run"])
        assert shown.exit_code == 2, shown.output
        assert "TB of" in shown.output
    assert host_needs(run_config(), 8, range(3)).total < 10**9


def test_a_dry_run_prints_the_notes_of_a_start(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    run = run_config().model_copy(
        update={"data": DataConfig(path=str(tmp_path / "binary"), sequence_length=16)}
    )
    write_config(run, tmp_path / "run.toml")
    options = ["--dry-run", "--set", "data.train_sequences=8", "--set", "data.eval_sequences=4"]
    shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), *options])
    assert shown.exit_code == 0, shown.output
    assert "is not UTF-8 text; it is read as plain bytes" in shown.output


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
    ("method", "words"), [("allreduce", 0), ("cocktail", 1.75), ("diloco", 2), ("demo", 2)]
)
def test_replicas_count_what_they_keep_to_exchange(method: str, words: float) -> None:
    """cocktail: a global copy, a server's error for its half of it, and what an exchange of a tenth
    finds, 2.5 times; diloco: a global copy and a momentum.
    """
    pipeline = {"cuts": [2], "microbatches": 2, "replicas": 2}
    alone, together = (
        rank_memory(config(pipeline=pipeline, gradcomp={"method": name}))
        for name in ("none", method)
    )
    for one, replica in zip(alone, together, strict=True):
        assert replica.exchange == pytest.approx(words * one.weights, rel=0.02)
        assert replica.saved == one.saved + replica.exchange
        assert replica.total == one.total + replica.exchange + one.weights


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
        kept = sum(_Bench(run, block)._activations() for block in blocks)
        held = in_flight(run, stage)
        assert counted.activations + held * counted.casts == pytest.approx(held * kept, rel=0.1)
        assert (counted.casts > 0) == (precision == "bf16")
