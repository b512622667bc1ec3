"""Ranks that do not fit together do not start, and tell the others."""

from pathlib import Path

import pytest

from tests.commands import Command
from tests.launch.test_train import run_file
from tests.ports import free_port

__all__ = ["run_file"]

pytestmark = pytest.mark.dist


def as_rank(rank: int, world: int, port: int, *arguments: object) -> Command:
    """A rank as torchrun starts it."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "MASTER_PORT": port}
    environment = {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    return Command("train", *arguments, environment=environment)


def reported_by(ranks: list[Command]) -> list[str]:
    """What ranks that do not start print."""
    try:
        ended = [rank.done() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [done.returncode for done in ended] == [2] * len(ranks), ended
    return [done.stdout + done.stderr for done in ended]


CUT = ("--set", "pipeline.cuts=[2]")


def test_ranks_with_different_configs_or_data_reject_to_start(run_file: Path) -> None:
    other = run_file.parent / "other.txt"
    other.write_text(
        (run_file.parent / "text.txt").read_text(encoding="utf-8").replace("7 squared", "7 cubed")
    )
    port, change = free_port(), ["--set", "train.lr=0.5", "--set", f"data.path={other}"]
    ranks = [as_rank(0, 2, port, run_file, *CUT), as_rank(1, 2, port, run_file, *CUT, *change)]
    for output in reported_by(ranks):
        assert "rank 1 has train.lr = 0.5, rank 0 has 0.001" in output
        assert "rank 1 has data.train = " in output  # where texts are may differ


def test_ranks_that_cannot_start_tell_the_others(run_file: Path) -> None:
    port = free_port()
    changes = ("data.path=/nowhere", "run.folder=/dev/null/run")
    ranks = [
        as_rank(rank, 2, port, run_file, *CUT, "--set", change)
        for rank, change in enumerate(changes)
    ]
    for output in reported_by(ranks):
        assert "rank 0: data.path = '/nowhere'" in output
        assert "rank 1: run.folder = /dev/null/run: /dev/null is a file" in output


def test_a_rank_that_nobody_joins_ends(run_file: Path) -> None:
    port, patience = free_port(), ["--set", "pipeline.peer_timeout_s=2"]
    (output,) = reported_by([as_rank(1, 3, port, run_file, *patience)])
    assert "error: rank 0 did not join within 2 s" in output
    assert f"127.0.0.1:{port}" in output
    assert "Traceback" not in output


def test_a_wrong_number_of_processes_is_rejected(run_file: Path) -> None:
    (output,) = reported_by([as_rank(0, 1, free_port(), run_file)])
    assert "3 ranks per pipeline (pipeline.cuts) with pipeline.replicas = 1 need 3" in output


def test_a_rank_without_supervisor_is_no_part_of_an_elastic_run(run_file: Path) -> None:
    replicas = ("pipeline.cuts=[]", "pipeline.replicas=2", "train.batch_size=4")
    settings = ("elastic.min_replicas=1", *replicas)
    elastic = [word for setting in settings for word in ("--set", setting)]
    (output,) = reported_by([as_rank(0, 2, free_port(), run_file, *elastic)])
    assert "elastic.min_replicas = 1: nobody would tell the others of the loss" in output
    assert "add --nnodes and --rdzv" in output
