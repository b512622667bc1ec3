"""Memory needs are computed before a run starts; one that exceeds what is free is rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.invoking import said
from tests.texts import write_squares
from tests.training import config
from thinpipe.launch.config.caches import row_nbytes, sample_capacity
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.memory import rows as planned
from thinpipe.launch.memory.rows import check_memory, memory_notices, needs, plan_memory

PUBLISHED_XL = 2 * 1024 * 1600 * 2  # of a sample on each rank: fp16, what is received and what sent


def xl(memory: Any = 4, **host: Any) -> RunConfig:
    """GPT2-XL's shape in three stages."""
    return config(
        model={"layers": 48, "width": 1600, "heads": 25, "context": 1024},
        data={"sequence_length": 1024, "train_sequences": 2344, "tokenizer": "bytes"},
        pipeline={"cuts": [16, 32]},
        boundary=[{"forward": {"kind": "aqsgd", "bits": 2, "memory": memory}}],  # type: ignore[arg-type]
        memory=host,
    )


def row_of(run: RunConfig) -> int:
    return row_nbytes(run, run.boundary_at(16).forward)


def test_bytes_of_gpt2_xl_samples() -> None:
    scales = 2 * 1024
    assert row_of(xl(4)) == 1024 * 1600 // 2 + scales
    assert PUBLISHED_XL / row_of(xl(4)) == pytest.approx(8, rel=0.003)
    assert PUBLISHED_XL / row_of(xl(8)) == pytest.approx(4, rel=0.003)
    assert PUBLISHED_XL / row_of(xl("bf16")) == 2
    ends = plan_memory(xl(4), 2344)
    assert [(end.cut, end.side, end.position) for end in ends] == [
        (16, "sender", 0),
        (16, "receiver", 1),
        (32, "sender", 1),
        (32, "receiver", 2),
    ]
    assert {end.held for end in ends} == {2344}


def test_samples_of_replicas_that_may_be_lost_are_counted() -> None:
    sections: dict[str, Any] = {
        "pipeline": {"cuts": [2], "replicas": 4},
        "boundary": [{"forward": {"kind": "aqsgd"}}],
        "train": {"batch_size": 8},
    }
    run, going_on = config(**sections), config(**sections, elastic={"min_replicas": 2})
    ends = plan_memory(going_on, 1000)
    assert {(end.held, end.samples, end.most) for end in ends} == {(250, 250, 500)}
    assert not memory_notices(ends)
    whole, alone = (needs(run, plan_memory(run, 1000), here).rows for here in ([0] * 4, [0]))
    assert whole == 4 * alone
    assert needs(going_on, ends, [0]).rows == 2 * alone
    assert needs(going_on, ends, [0] * 4).rows == whole, "two are left, each with half"
    on_disk = config(**sections, elastic={"min_replicas": 2}, memory={"tier": "disk"})
    assert needs(on_disk, ends, [0] * 4).disk == 2 * whole, "reserved by each"


def test_a_budget_is_shared_by_the_ends_of_a_rank() -> None:
    run = xl(4, budget="2GB")
    row, batch = row_of(run), 8
    assert sample_capacity(run, 0) == 2_000_000_000 // row - batch
    assert sample_capacity(run, 1) == 2_000_000_000 // (2 * row) - batch
    held = {(end.cut, end.side): end.held for end in plan_memory(run, 10_000)}
    # every cut touches the rank in the middle
    assert set(held.values()) == {sample_capacity(run, 1)}
    assert [text.split(" samples,")[0] for text in memory_notices(plan_memory(run, 10_000))] == [
        f"note: cut {cut} forward caches {sample_capacity(run, 1):,} of 10,000" for cut in (16, 32)
    ]
    assert memory_notices(plan_memory(run, 1000)) == []
    on_disk = xl(4, budget="2GB", tier="disk")
    assert sample_capacity(on_disk, 0) == 2_000_000_000 // row
    found = needs(run, plan_memory(run, 10_000), [1])
    assert found.ram - found.ram // 2 <= 2_000_000_000  # the other half: a checkpoint's copy


def test_memories_of_gradients_count_too() -> None:
    run = xl(4, budget="2GB")
    gradients = {"kind": "aqsgd", "bits": 4, "memory": 4}
    tables = ({**table.model_dump(), "backward": gradients} for table in run.boundary)
    both = run.updated(boundary=[*tables])
    ends = plan_memory(both, 100)
    assert [(end.direction, end.side, end.position) for end in ends if end.cut == 16] == [
        ("forward", "sender", 0),
        ("forward", "receiver", 1),
        ("backward", "sender", 1),
        ("backward", "receiver", 0),
    ]
    rows = 2_000_000_000 // (2 * row_of(run))
    assert sample_capacity(both, 0) == rows - 8  # what a step writes
    forward = needs(run, plan_memory(run, 100), [0, 1, 2])
    assert needs(both, ends, [0, 1, 2]).rows == 2 * forward.rows


def test_a_budget_below_one_sample_names_the_least_budget() -> None:
    with pytest.raises(ConfigError, match=r"memory.budget = 1.00 MB: .* use 14.8 MB or more"):
        sample_capacity(xl(4, budget="1MB"), 0)
    assert sample_capacity(xl(4, budget="14.8MB"), 0) == 10
    assert sample_capacity(xl(4, budget="14.8MB"), 1) == 1  # enough for the rank that needs most


def test_cuts_without_memories_need_nothing() -> None:
    assert plan_memory(config(), 100) == []
    assert sample_capacity(config(memory={"budget": 1}), 0) is None


@pytest.mark.parametrize(
    ("tier", "disk", "ram", "message"),
    [
        ("disk", 10**9, 10**12, r"the activation cache takes 7.70 GB on disk, but .* 1"),
        ("ram", 0, 10**9, r'the activation cache takes 15.4 GB of RAM.* "disk"'),
    ],
)
def test_memories_that_do_not_fit_are_rejected(
    monkeypatch: pytest.MonkeyPatch, tier: str, disk: int, ram: int, message: str
) -> None:
    monkeypatch.setattr(planned, "free_nbytes", lambda _folder: disk)
    monkeypatch.setattr(planned, "free_memory", lambda: ram)
    with pytest.raises(ConfigError, match=message):
        check_memory(xl(4, tier=tier), 2344, range(3))


def test_offload_is_rejected_on_a_host_without_gpus() -> None:
    rejection = r'offload = true is for stages on a GPU, but pipeline.device = "cpu"; remove'
    with pytest.raises(ConfigError, match=rejection):
        check_memory(config(pipeline={"device": "cpu", "offload": True}), 8, range(2))


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    memory = {"tier": "disk", "folder": str(tmp_path / "file" / "below")}
    run = config(boundary=[], memory=memory)  # type: ignore[arg-type]
    message = r"memory.folder = .*below: no file can be made there: Not"
    with pytest.raises(ConfigError, match=message), in_process(run, total_steps=1):
        pass


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    text, path = write_squares(tmp_path / "text.txt"), tmp_path / "run.toml"
    run = config(
        run={"folder": str(tmp_path / "run")},
        data={"path": str(text), "train_sequences": 24, "eval_sequences": 8},
        pipeline={"cuts": [1, 3]},
        boundary=[],  # type: ignore[arg-type]
    )
    write_config(run, path)
    return path


def test_dry_run_shows_the_plan_and_starts_nothing(run_file: Path) -> None:
    output = dry_run(run_file, "memory.tier=disk")
    assert "384 B" in output  # 12 tokens of 16 channels in bf16
    assert "24 of 24" in output
    assert "with all 3 ranks on this host: disk 36.9 kB of" in output
    output = dry_run(run_file, "memory.budget=3kB", code=2)
    assert "memory.budget = 3.00 kB: a sample takes" in output
    assert not (run_file.parent / "run").exists()


def dry_run(path: Path, *settings: str, code: int = 0) -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    return said("train", path, "--dry-run", *words, code=code)


def test_a_dry_run_says_that_lost_replicas_count(run_file: Path) -> None:
    output = dry_run(run_file, "pipeline.replicas=2", "elastic.min_replicas=1")
    assert "bytes include room for samples of lost replicas, down to 1 left" in output
    assert "lost replicas" not in dry_run(run_file, "pipeline.replicas=2")


def test_a_dry_run_shows_automatic_cuts_as_auto_and_what_counts_twice(run_file: Path) -> None:
    output = dry_run(run_file, "pipeline.cuts=auto", "pipeline.stages=3")
    assert "the 2 cuts are chosen when the run starts" in output
    assert output.count("│ auto │") == 4  # every end
    assert "(36.9 kB of rows, 36.9 kB for a copy while a checkpoint is saved, 12.3 kB" in output


def test_a_dry_run_reports_that_there_are_no_memories(run_file: Path) -> None:
    output = dry_run(run_file, 'boundary=[{forward={kind="direct"}}]')
    assert output.startswith("no activation cache: no boundary uses AQ-SGD ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_counts_for_a_gpu_that_is_not_there_and_a_start_rejects_it(
    run_file: Path,
) -> None:
    output = dry_run(run_file, "pipeline.device=cuda")
    assert "model, activations and what is cached on a GPU: up to" in output
    assert "note: torch finds no GPU on this host" in output
    output = said("train", run_file, "--set", "pipeline.device=cuda", code=2)
    assert 'pipeline.device = "cuda": torch finds no GPU' in output
    assert "starting" not in output


def test_a_dry_run_for_several_machines_counts_the_share_of_each(run_file: Path) -> None:
    alone = dry_run(run_file)
    train = ("train", run_file, "--dry-run", "--nnodes")
    three = said(*train, 3)
    pairs = said(*train, 2, "--rdzv", "h:1", "--ranks", 2)
    assert alone.count("on this host: RAM") == 1
    for rank in range(3):
        assert f"with rank {rank} on this host: RAM" in three
        assert f"model, activations and activation cache of rank {rank} together: RAM" in three
    assert "with ranks 0, 1 on this host: RAM" in pairs
    assert "with ranks 1, 2 on this host: RAM" in pairs
    uneven = said(*train, 2, code=2)
    assert "--nnodes = 2: 3 ranks (stages x replicas) cannot be shared evenly" in uneven


def test_a_batch_larger_than_all_samples_is_rejected(run_file: Path) -> None:
    output = dry_run(run_file, "train.batch_size=32", code=2)
    assert "train.batch_size = 32, but there are 24 training samples" in output
