"""Machines get the ranks that `pipeline.placement` names them for, in whatever order they join."""

import json
import re
from pathlib import Path

import pytest

from tests.commands import Command
from tests.launch.test_train import run_file, start
from tests.ports import LOOPBACK, free_port
from thinpipe.launch.cli import main
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.net.ranks.elastic import Nodes, run_node
from thinpipe.launch.net.ranks.network import PLACED, first_here

__all__ = ["run_file"]


def settings(
    name: str, port: int, folder: Path, placed: str = "ba", cuts: str = "[1]"
) -> list[object]:
    sets = [f"network.name={name}", f"run.folder={folder / name}", f"pipeline.cuts={cuts}"]
    sets += [f"pipeline.placement=[{json.dumps([*placed])}]"]
    sets += ["pipeline.replicas=1", "pipeline.peer_timeout_s=120"]
    chosen = [word for text in sets for word in ("--set", text)]
    return [*chosen, "--nnodes", "2", "--rdzv", f"{LOOPBACK}:{port}"]


def test_a_machine_that_is_not_named_is_rejected() -> None:
    nodes = Nodes(2, f"{LOOPBACK}:1", 0, 9.0, placed=("b", "a"))
    said = r"pipeline.placement: this machine is 'c' \(network.name\), which it does not"
    with pytest.raises(ValueError, match=said):
        run_node(main, [], 1, nodes, NetworkConfig(name="c"))


def test_a_machine_that_joins_twice_is_named(run_file: Path, tmp_path: Path) -> None:
    port = free_port()
    commands = [Command("train", run_file, *settings("a", port, tmp_path)) for _ in range(2)]
    done = [command.done() for command in commands]
    assert all(one.returncode for one in done)
    assert all("missing: b; there twice: a" in one.stderr for one in done)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "where"), [("a", ("ba", "[1]")), ("b", ("bab", "[1, 2]"))])
def test_ranks_are_where_the_run_file_puts_them(
    run_file: Path, tmp_path: Path, first: str, where: tuple[str, str]
) -> None:
    """Rank 0, on b, writes the metrics; machines may have unequal shares."""
    port = free_port()
    order = first + "ab".replace(first, "")
    started = [start(run_file, *settings(order[0], port, tmp_path, *where))]
    assert started[0].stdout is not None
    assert started[0].stdout.readline().startswith("starting ")
    assert started[0].stdout.readline().startswith("waiting for 2 machines")
    started.append(start(run_file, *settings(order[1], port, tmp_path, *where)))
    outputs = [one.communicate(timeout=180)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], outputs
    assert (tmp_path / "b" / "metrics.jsonl").exists()
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    assert not re.search("error", outputs[0] + outputs[1])


def test_placed_ranks_of_a_machine_have_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not follow each other; those that are not placed do."""
    monkeypatch.delenv(PLACED, raising=False)
    assert [first_here(rank, rank % 2) for rank in range(4)] == [0, 0, 2, 2]
    monkeypatch.setenv(PLACED, "1,3")
    assert [first_here(rank, local) for local, rank in enumerate((1, 3))] == [1, 1]
