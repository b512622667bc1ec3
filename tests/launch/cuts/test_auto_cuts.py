"""`cuts = "auto"`: settings, the plan, and runs that choose their cuts."""

import json
import re
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invoking import said
from tests.launch.test_train import RUN, run_file, thinpipe
from tests.ranks import run_ranks
from tests.training import config
from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.cuts.auto_cuts import decide_cuts, find_cuts, smooth_noise
from thinpipe.launch.cuts.profile import BlockCost
from thinpipe.launch.memory.host import added_nbytes, device_nbytes
from thinpipe.launch.memory.model import block_memory
from thinpipe.launch.net.ranks.session import Session
from thinpipe.pipeline.comm.gloo import GlooTransport

__all__ = ["run_file"]

CODED: Any = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct"}}]
AUTO = ["--set", "pipeline.cuts=auto", "--set", "pipeline.stages=2"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are timed a few times only."""
    monkeypatch.setattr("thinpipe.launch.cuts.profile._LEAST_S", 0.0)
    monkeypatch.setattr("thinpipe.launch.cuts.profile._MOST_S", 0.0)


def load(tmp_path: Path, **pipeline: Any) -> Any:
    path = tmp_path / "run.toml"
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in pipeline.items())
    path.write_text("[pipeline]\n" + "".join(lines))
    return load_config(path)


def test_auto_needs_the_number_of_stages_and_nothing_else(tmp_path: Path) -> None:
    config = load(tmp_path, cuts="auto", stages=3)
    assert (config.pipeline.stages, config.world_size, config.pipeline.auto_cuts) == (3, 3, True)
    decided = config.with_cuts((4, 7))
    assert (decided.pipeline.cuts, decided.pipeline.auto_cuts) == ((4, 7), False)
    assert load(tmp_path, cuts=[2, 4], stages=3).pipeline.cuts == (2, 4)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"cuts": "auto"}, 'pipeline.cuts = "auto": how many stages'),
        ({"cuts": "auto", "stages": 0}, "pipeline.stages = 0: give a whole number, 1 or more"),
        ({"cuts": "auto", "stages": "None"}, "pipeline.stages = 'None': give a whole number"),
        ({"cuts": [2], "stages": 4}, r"pipeline.stages = 4, but cuts = \[2\] makes 2"),
        ({"cuts": "auto", "stages": 9}, "pipeline.stages = 9: the model has 8 layers.* at most 8"),
        ({"auto_cuts": True}, "pipeline.auto_cuts: unknown key"),
    ],
)
def test_impossible_settings_are_rejected(
    tmp_path: Path, pipeline: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **pipeline)


def test_a_boundary_cannot_name_an_automatic_cut(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="cuts are not known yet"):
        load_config(run_file, ["pipeline.cuts=auto", "pipeline.stages=2", "boundary.0.cut=1"])


def block(seconds: float, optimizer_s: float = 1) -> BlockCost:
    return BlockCost(seconds / 4, 3 * seconds / 4, optimizer_s)


def test_differences_within_noise_count_as_equal() -> None:
    slightly_slower = [block(1.12, 7), block(1.01), block(1.1), block(1.5, 9)]
    half_as_fast = [block(2.0), block(2.1), block(2.2), block(3.0)]
    fast = [block(1.0, 7), block(1.1), block(1.05), block(1.5, 9)]
    first, second, third = smooth_noise([slightly_slower, fast, half_as_fast])
    assert first == second == [block(1.0, 7), block(1.0), block(1.0), block(1.5, 9)]
    assert third == [block(2.0), block(2.0), block(2.0), block(3.0)]


@pytest.mark.parametrize(
    ("cores", "spare", "middle"),
    [
        (1, [True] * 3, 4),
        (2, [True, False, True], 1),
        (2, [False] * 3, 1),
        (2, None, 4),  # all machines are like this one
        (1, None, 1),
    ],
)
def test_codecs_take_from_compute_only_where_cores_are_scarce(
    monkeypatch: pytest.MonkeyPatch, cores: int, spare: list[bool] | None, middle: int
) -> None:
    monkeypatch.setattr("thinpipe.launch.cuts.auto_cuts.usable_cores", lambda: cores)
    run = config(model={"layers": 12}, pipeline={"cuts": "auto", "stages": 3}, boundary=CODED)
    quick = [block(1e-6)] * 12  # compared with which encoding a message takes long
    first, second = find_cuts(run, [quick] * 3, spare_cores=spare)
    assert second - first == middle


def test_stages_fit_what_their_machines_have() -> None:
    """With AQ-SGD's rows, a copy for checkpoints and what a process takes."""
    run = config(model={"layers": 12}, pipeline={"cuts": "auto", "stages": 3}, boundary=CODED)
    blocks, cuts = [[block(1.0)] * 12] * 3, run.with_cuts((2, 10))
    needed = device_nbytes(cuts, 64)
    added, without = added_nbytes(run, 64, block_memory(run), None)
    summed = [without[0] + sum(added[0][:2]), without[2] + sum(added[2][10:])]
    for whole, of_blocks in zip((needed[0], needed[2]), summed, strict=True):
        assert whole <= of_blocks < 1.02 * whole, "gaps between tensors are not quite sums"
    assert find_cuts(run, blocks, 64, spare_cores=[True] * 3) == (4, 8)
    limits = [summed[0], 10**12, summed[1]]
    assert find_cuts(run, blocks, 64, memory_limit=limits, spare_cores=[True] * 3) == (2, 10)
    limits[0] -= 10**6
    with pytest.raises(ValueError, match="do not fit 3 stages"):
        find_cuts(run, blocks, 64, memory_limit=limits)


def _decide(rank: int) -> tuple[int, ...]:
    run = config(
        model={"layers": 8, "width": 128, "heads": 2},
        pipeline={"cuts": "auto", "stages": 3},
        train={"batch_size": 64},
    )
    store: Any = None
    session = Session(store, GlooTransport(3, 1, timeout_s=60), 7, local_rank=rank)
    return decide_cuts(run, session, 64, saved=None, log=False).pipeline.cuts


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_that_share_a_machine_cut_equal_blocks_evenly() -> None:
    (cuts,) = set(run_ranks(3, _decide))
    assert max(b - a for a, b in pairwise((0, *cuts, 8))) == 3


@pytest.mark.slow
@pytest.mark.dist
def test_cuts_are_decided_once_and_kept_at_resume(run_file: Path) -> None:
    done = thinpipe(run_file, *AUTO, "--set", "train.epochs=2", code=0)
    assert done.stderr.count('pipeline.cuts = "auto": [') == 1
    assert re.search(r"stages take \d+(\.\d+)? m?s, \d+(\.\d+)? m?s per", done.stderr)
    folder = run_file.parent / "run"
    (cut,) = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["pipeline"]["cuts"]
    assert 1 <= cut <= 3
    # had the checkpoint other cuts, a resumed run would take those
    for step in (8, 10):
        path = folder / f"checkpoints/step-{step}/manifest.json"
        manifest = json.loads(path.read_text(encoding="utf-8"))
        assert manifest["meta"]["config"]["pipeline"]["cuts"] == [cut]
    shutil.rmtree(folder / "checkpoints" / "step-10")
    (folder / "checkpoints" / "latest").write_text("step-8\n")
    again = thinpipe(run_file, *AUTO, "--resume", "--set", "train.epochs=2", code=0)
    assert "auto" not in again.stderr  # nothing was measured again


def test_plan_shows_and_applies(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two compete on a busy machine
    monkeypatch.setattr("thinpipe.launch.cuts.profile.interference_warning", lambda *_, **__: None)
    text = RUN.format(folder="out", text="text.txt").replace("cuts = [1, 3]", 'cuts = "auto"')
    run_file.write_text(text.replace("microbatches", "stages = 2  # hosts\nmicrobatches"))
    delay = ("--delay", "20ms", "--apply")
    output = said("plan", run_file, "--rate", "20kbit", "--speeds", "1,9", *delay)
    for word in ("stage", "backward", "memory", "direct", "predicted step", "recommended"):
        assert word in output
    config = load_config(run_file)
    assert config.pipeline.cuts == (1,)  # the second machine is nine times as fast
    assert config.boundary_at(1).forward.kind == "aqsgd"  # 20 kbit/s carry no more
    assert "[train]" in run_file.read_text(encoding="utf-8")
    assert f"written to {run_file}: cuts [1] and bits" in output
    again = said("plan", run_file, *delay)
    assert "cuts [1]; bits unchanged: give --rate or --network" in again
    assert "the highest latency between two ranks is 20 ms" in again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "message"),
    [
        (False, "block timings are unreliable (busy)"),
        (True, "8 kbit/s, which were closed or failing"),
    ],
)
def test_plan_does_not_apply_what_it_distrusts(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, *, closed: bool, message: str
) -> None:
    name, warning = "thinpipe.launch.cuts.profile.interference_warning", None if closed else "busy"
    monkeypatch.setattr(name, lambda *_, **__: warning)
    network = run_file.parent / "net.json"
    rates = [[None, 8e3, 1e8], [1e8, None, 1e8], [1e8, 1e8, None]]
    network.write_text(json.dumps({"rate_bps": rates}))
    links = ("--network", network) if closed else ("--rate", "1mbit")
    before = run_file.read_text(encoding="utf-8")
    output = said("plan", run_file, *links, "--apply", code=2)
    assert f"error: --apply: nothing was written to {run_file}" in output
    assert message in output
    assert ("(0 -> 1)" in output) == closed
    assert "predicted step" in output
    assert run_file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(("setting", "threads"), [(None, 7), ("3", 3)])
def test_plan_measures_with_the_threads_of_a_rank_alone_on_its_machine(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr("thinpipe.launch.host.resources.usable_cores", lambda: 8)
    output = said("plan", run_file)
    assert torch.get_num_threads() == threads
    assert f"each stage on its own machine with {threads} threads" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "fast"], "--rate = 'fast'"),
        (["--network", "nowhere.json"], "nowhere.json"),
        (["--network", "n.json", "--rate", "1mbit"], "leave out --rate"),
        (["--speeds", "1,2"], "or 3 separated by commas"),
        (["--memory", "0.000001"], "which has stage 0, needs"),
        (["--set", "pipeline.devices_per_rank=2", "--set", "pipeline.cuts=[2]"], "on one device"),
    ],
)
def test_wrong_options_are_rejected(run_file: Path, options: list[str], message: str) -> None:
    assert message in said("plan", run_file, *options, code=2)
