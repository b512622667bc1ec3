"""Packed prompts with prefixes for a Hugging Face model, 2 stages by 2 replicas, all compressed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.huggingface import saved_model, section
from tests.ranks import run_ranks
from tests.training import checkpoints, config, restore, start, weights
from thinpipe.launch.checkpoint.reshard import parameter_names
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.corpus import check_data
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.launch.trained.export_hf import export

STEPS, SAVED = 8, 5  # an epoch has 4 steps: memories are warm when the run is saved


def run_config(folder: Path, **pipeline: Any) -> RunConfig:
    fields = {"prompt_field": "prompt", "response_field": "response", "objective": "prefix"}
    sizes = {"sequence_length": 32, "train_sequences": 16, "eval_sequences": "all"}
    return config(
        run={"folder": str(folder / "run")},
        model=section("gptj", folder / "source"),
        data={"path": str(folder / "rows.jsonl"), "packing": True, **fields, **sizes},
        pipeline={"cuts": [2], "replicas": 2, **pipeline},
        boundary=[{"forward": {"kind": "aqsgd", "bits": 3}}],  # type: ignore[arg-type]
        gradcomp={"method": "cocktail", "cocktail": {"subset": 0.5, "warmup_steps": 1}},
        train={"batch_size": 4, "decay": "linear"},
    )


def global_weights(built: Built) -> dict[str, Tensor]:
    with built.sync.global_parameters():
        return weights(built)


def outcome(built: Built, losses: list[float]) -> dict[str, Any]:
    moments = built.optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "weights": weights(built),
        "global": global_weights(built),
        "moments": {
            name: moments[place]["exp_avg"].clone()
            for place, (name, *_) in enumerate(parameter_names(built))
            if place in moments
        },
    }


class Training:
    """One rank of a run, on data that it reads itself."""

    def __init__(self, rank: int, run: RunConfig) -> None:
        self._corpus, self.built = check_data(run), start(run)
        transport = self.built.engine.transport
        mesh = transport.mesh
        self._sampler = EpochSampler(
            len(self._corpus.train),
            batch_size=run.train.batch_size,
            replicas=mesh.replicas,
            replica=mesh.replica,
            seed=0,
        )
        self.checkpoints = checkpoints(run, self.built, rank)

    def train(self, steps: range) -> dict[str, Any]:
        losses = []
        for step in steps:
            batch = self._corpus.train.batch(self._sampler.ids(step))
            assert batch.segments_BT is not None
            assert batch.segments_BT.amax() > 1, "several examples share a sequence"
            losses.append(self.built.engine.train_step(batch, step).loss)
            self.built.lr_schedule.step()
        return outcome(self.built, losses)


def _save_and_resume(rank: int, run: RunConfig) -> tuple[dict[str, Any], ...]:
    """What was saved, and what came of it without and with a resume in between."""
    straight = Training(rank, run)
    saved = straight.train(range(SAVED))
    straight.checkpoints.save(SAVED)
    through = straight.train(range(SAVED, STEPS))
    again = Training(rank, run)
    assert restore(again.checkpoints) == SAVED
    return saved, through, again.train(range(SAVED, STEPS))


def _resume(rank: int, run: RunConfig) -> tuple[dict[str, Any], ...]:
    moved = Training(rank, run)
    assert restore(moved.checkpoints) == SAVED
    return outcome(moved.built, []), moved.train(range(SAVED, STEPS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_model("gptj", tmp_path / "source")
    rows = [{"prompt": f"{n} and {n + 1}? ", "response": str(2 * n + 1)} for n in range(70)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    return tmp_path


def exported(run: RunConfig, out: Path) -> dict[str, Tensor]:
    export(run.run.path, out, step=None, dtype="source")
    files = out.glob("*.safetensors")
    return {f"model.{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


@pytest.mark.slow
@pytest.mark.dist
def test_a_packed_run_resumes_bit_for_bit_is_exported_and_moves(folder: Path) -> None:
    run = run_config(folder)
    found = run_ranks(4, _save_and_resume, run)
    for _, through, again in found:
        assert again["losses"] == through["losses"]
        for what in ("weights", "global", "moments"):
            assert_equal(again[what], through[what])
    write_config(run, run.run.path / "config.toml")
    tensors = exported(run, folder / "out")
    for saved, _, _ in found:  # replicas differ from the model that is exported
        assert_equal(saved["global"], {name: tensors[name] for name in saved["global"]})
        assert any(not torch.equal(w, tensors[name]) for name, w in saved["weights"].items())
    moved = run_ranks(3, _resume, run_config(folder, cuts=[1, 4], replicas=1))
    for now, before in (("weights", "global"), ("moments", "moments")):
        parts = {name: value for restored, _ in moved for name, value in restored[now].items()}
        assert_equal(parts, found[0][0][before] | found[1][0][before])
    assert moved[0][1]["losses"][-1] < found[0][0]["losses"][0]
