"""Runs whose stages are held by several ranks go on: bit for bit, or with other numbers of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.commands import run
from tests.ranks import run_ranks
from tests.texts import write_run
from tests.training import TORCH_2_13, batch, checkpoints, config, restore, share, start
from thinpipe.launch.checkpoint.files import read_manifest, steps
from thinpipe.launch.checkpoint.reshard import module_of, parameter_names
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.view.report.metrics import read_metrics

pytestmark = [pytest.mark.dist, TORCH_2_13]

RUN = """
[run]
folder = "{folder}"
[model]
layers = 4
width = 16
heads = 2
context = 32
[data]
path = "{text}"
sequence_length = 32
train_sequences = 16
eval_sequences = 5
[pipeline]
cuts = [2]
shards = 2
microbatches = 2
device = "cpu"
[shards]
method = "qsdp"
weight_rounding = "learned"
keep_below = 64
bucket = 64
[[boundary]]
forward = {{ kind = "aqsgd", bits = 3 }}
[train]
epochs = 2
batch_size = 4
warmup_steps = 2
[checkpoint]
every_steps = 3
keep = 9
"""


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_reports_its_bytes(tmp_path: Path) -> None:
    file, whole, again = write_run(tmp_path, RUN), tmp_path / "run", tmp_path / "again"
    run("train", file)
    shutil.copytree(whole, again)
    for step in steps(whole / "checkpoints")[1:]:
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    (again / "checkpoints" / "latest").write_text("step-3\n")
    run("train", file, "--resume", "--set", f"run.folder={again}")
    expected, found = (read_manifest(f / "checkpoints" / "step-8").parts for f in (whole, again))
    assert len(found) == 4
    assert found == expected  # names and SHA-256
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in (whole, again))
    assert [(r.loss, r.eval, r.weight_bytes) for r in second] == [
        (r.loss, r.eval, r.weight_bytes) for r in first
    ]
    assert min(first[0].weight_bytes, first[0].gradient_bytes) > 0


def _state(rank: int, run: RunConfig, root: str, resume: bool) -> Any:
    """Weights and first moments of this rank at step 2, which is saved or restored; and a step."""
    built = start(run)
    mesh = built.engine.transport.mesh
    saved = checkpoints(run, built, rank, root=Path(root))
    batches = [batch([6 * step + sample for sample in range(6)]) for step in range(3)]
    own = [share(whole, mesh.dp_rank, mesh.dp_size) for whole in batches]
    if resume:
        assert restore(saved) == 2
    else:
        for step in (0, 1):
            built.engine.train_step(own[step], step)
        saved.save(2)
    (stage,) = built.stages
    moments = built.optimizer.state_dict()["state"]
    found = [
        {name: tensor.clone() for name, tensor in module_of(stage).state_dict().items()},
        {
            name: moments[i]["exp_avg"].clone()
            for i, (name, *_) in enumerate(parameter_names(built))
        },
    ]
    built.engine.train_step(own[2], 2)
    return found


def joined(results: list[Any], shards: int) -> list[dict[str, Tensor]]:
    """Whole weights and moments, from those of the ranks of one replica."""
    found: list[dict[str, Tensor]] = [{}, {}]
    for first in range(0, len(results), shards):
        for place, whole in enumerate(found):
            parts = [result[place] for result in results[first : first + shards]]
            whole.update({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return found


@pytest.mark.slow
def test_weights_and_optimizer_survive_another_number_of_shards(tmp_path: Path) -> None:
    aqsgd = [{"forward": {"kind": "aqsgd", "bits": 4}}]

    def run(shards: int, cuts: list[int]) -> RunConfig:
        return config(
            pipeline={"cuts": cuts, "shards": shards},
            boundary=aqsgd,
            model={"vocab": 257},  # divided unevenly
            train={"batch_size": 6},
            shards={"method": "qsdp", "weights": "differences", "keep_below": 64},
        )

    saved = joined(run_ranks(4, _state, run(2, [2]), str(tmp_path), False), 2)
    for shards, cuts in ((3, [2]), (1, [1])):
        world = shards * (len(cuts) + 1)
        again = run_ranks(world, _state, run(shards, cuts), str(tmp_path), True)
        restored = joined(again, shards)
        for expected, found in zip(saved, restored, strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
