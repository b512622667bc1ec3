"""Runs that start from the weights of another, whatever the layout of either."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.training import TORCH_2_13, batch, checkpoints, config, share, start, weights
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.trained.model import read_trained, start_from_run

pytestmark = pytest.mark.dist


def run_in(folder: Path, **sections: Any) -> RunConfig:
    return config(run={"folder": str(folder)}, **sections)


def train_and_save(rank: int, run: RunConfig, machines: bool) -> None:
    """One step, saved; with `machines` every rank has a run folder of its own."""
    if machines:
        run = run.updated(run={"folder": f"{run.run.path}/host{rank}"})
    built = start(run)
    dp_rank = built.engine.transport.mesh.dp_rank
    built.engine.train_step(share(batch(list(range(8))), dp_rank, run.pipeline.dp_size), 0)
    checkpoints(run, built, 0 if machines else rank).save(1)
    write_config(run, run.run.path / "config.toml")


def begin(rank: int, run: RunConfig) -> dict[str, Tensor]:
    """This rank's weights where it starts."""
    built = start(run)
    assert start_from_run(built, run) is not None
    return weights(built)


def check(old: Path, **sections: Any) -> None:
    """A new run starts with the weights of an old one."""
    new = run_in(old.parent / "new", model={"from_run": str(old)}, **sections)
    expected, found = read_trained(old).tensors, dict[str, list[Tensor]]()
    for part in run_ranks(new.world_size, begin, new):
        for name, tensor in part.items():
            found.setdefault(name, []).append(tensor)
    assert found.keys() == expected.keys()
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), expected[name]), name


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"shards": 2}, {"pipeline": {"cuts": [1, 3]}}),
        pytest.param({"cuts": [1, 3]}, {"pipeline": {"shards": 2}}, marks=pytest.mark.slow),
        pytest.param(
            {"shards": 2},
            {"pipeline": {"cuts": [], "shards": 3}, "train": {"batch_size": 6}},
            marks=pytest.mark.slow,
        ),
    ],
)
@TORCH_2_13
def test_shards_and_cuts_may_differ(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    old = run_in(tmp_path / "old", pipeline=before)
    run_ranks(old.world_size, train_and_save, old, False)
    check(tmp_path / "old", **now)


def test_parts_of_several_machines_are_copied_together(tmp_path: Path) -> None:
    old = run_in(tmp_path, pipeline={"cuts": [1, 3]})
    run_ranks(old.world_size, train_and_save, old, True)
    home = tmp_path / "host0"
    missing = "replica-0.rank-1.safetensors, replica-0.rank-2.safetensors are not here; copy"
    with pytest.raises(CheckpointError, match=missing):
        read_trained(home)
    for host in ("host1", "host2"):
        shutil.copytree(tmp_path / host / "checkpoints", home / "checkpoints", dirs_exist_ok=True)
    check(home, pipeline={"cuts": [2]})
