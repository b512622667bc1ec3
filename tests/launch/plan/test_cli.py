"""The command `plan`, from the run file to what is printed."""

import json
from pathlib import Path

import pytest

from tests.huggingface import CLASSES, ENCODERS, MODELS, TRIED, settings
from tests.invoking import invoke
from tests.training import TORCH_2_13

QUICK = ("bert", "llama", "mixtral")
FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted({**MODELS, **TRIED})
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are timed once: it is not their seconds that are of interest."""
    for name, value in {"_LEAST_ROUNDS": 2, "_LEAST_S": 0.0, "_MOST_S": 0.0}.items():
        monkeypatch.setattr(f"thinpipe.launch.cuts.profile.{name}", value)
    monkeypatch.setattr("thinpipe.launch.plan.cli.keep_freed_memory", lambda: None)
    monkeypatch.setattr("thinpipe.launch.plan.cli.rank_threads", lambda ranks: ranks)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_planned(name: str, tmp_path: Path) -> None:
    settings(name).save_pretrained(tmp_path / "model")
    model, data = f'config = "{tmp_path}/model"', "sequence_length = 8"
    if name in ENCODERS:
        model += f'\ntask = "classification"\nclasses = {CLASSES}'
        (tmp_path / "rows.tsv").write_text("some words\t1\n" * 80)
        data += f'\npath = "{tmp_path}/rows.tsv"\ntext_field = 0\nlabel_field = 1'
        data += "\ntrain_sequences = 8\neval_sequences = 8"
    run = tmp_path / "run.toml"
    run.write_text(
        f"[model]\n{model}\n[data]\n{data}\n"
        "[pipeline]\ncuts = [3]\nmicrobatches = 2\ndevice = 'cpu'\n[train]\nbatch_size = 4\n"
    )
    code, output = invoke("plan", run)
    assert code == 0, output
    assert "predicted step" in output


SMALL = """
[model]
layers = 4
width = 16
heads = 2
context = 16
[data]
sequence_length = 8
[train]
batch_size = 8
[pipeline]
device = "cpu"
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("cuts", "hosts"),
    [*(pytest.param(cuts, 2, marks=pytest.mark.slow) for cuts in ([], [2])), ([2], 4)],
)
def test_replicas_are_planned_on_the_links_of_all_their_hosts(
    cuts: list[int], hosts: int, tmp_path: Path
) -> None:
    """The last of four hosts has the slowest link, so the second replica has."""
    run, net = tmp_path / "run.toml", tmp_path / "net.json"
    run.write_text(f"{SMALL}cuts = {cuts}\nreplicas = 2\n")
    rates = [[1e8 if hosts - 1 not in (i, j) else 1e6 for j in range(hosts)] for i in range(hosts)]
    net.write_text(json.dumps({"rate_bps": rates}))
    code, output = invoke("plan", run, "--network", net)
    assert code == 0, output
    ranks = 2 * (len(cuts) + 1)
    assert f"{ranks} replicas of the whole model" in output
    assert ("speed-up" in output) == bool(cuts)
    assert ("1 Mbit/s" in output) == (hosts == 4)


@pytest.mark.usefixtures("quick")
def test_the_placement_says_on_which_links_ranks_are(tmp_path: Path) -> None:
    """Both replicas avoid the slow link, between the first two hosts."""
    run, net = tmp_path / "run.toml", tmp_path / "net.json"
    rates = [[1e6 if i + j == 1 else 1e8 for j in range(4)] for i in range(4)]
    net.write_text(json.dumps({"rate_bps": rates, "hosts": ["a", "b", "c", "d"]}))
    for last, expected, said in (("d", 0, "100 Mbit/s"), ("e", 2, "no host e, which")):
        run.write_text(
            f'{SMALL}cuts = [2]\nreplicas = 2\nplacement = [["a", "c"], ["b", "{last}"]]\n'
        )
        code, output = invoke("plan", run, "--network", net)
        assert code == expected, output
        assert said in output
        assert " 1 Mbit/s" not in output


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("schedule", ["LoopedBFS", pytest.param("ZBVZeroBubble", marks=TORCH_2_13)])
def test_schedules_with_several_stages_per_rank_are_planned(schedule: str, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'{SMALL}cuts = [1, 2, 3]\nschedule = "{schedule}"\nmicrobatches = 4\n')
    code, output = invoke("plan", run, "--rate", "1mbit", "--delay", "20ms")
    assert code == 0, output
    assert "predicted step" in output
    assert "the same machines as 2 replicas" in output
    assert ("within a rank" in output) == (schedule == "ZBVZeroBubble")
    auto = ("pipeline.cuts=auto", "pipeline.stages=4", "pipeline.ranks=2")
    code, output = invoke("plan", run, *(word for setting in auto for word in ("--set", setting)))
    assert code == 0, output
