import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.training import batch, checkpoints, config, restore, start
from thinpipe.launch.checkpoint.contents import collect
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.reshard import (
    Layout,
    common_model,
    load_module,
    module_of,
    moved_samples,
    parameter_names,
)
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig

pytestmark = pytest.mark.dist
BATCHES = [batch([8 * step + sample for sample in range(8)]) for step in range(5)]
AQSGD = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "aqsgd", "bits": 6}}]
COCKTAIL = {"subset": 0.5, "topk": 0.5, "bits": 4, "bucket_mb": 0.01}


def run_config(cuts: list[int], **sections: Any) -> RunConfig:
    pipeline = {"cuts": cuts, **sections.pop("pipeline", {})}
    train = {"batch_size": 8, "warmup_steps": 0, "decay": "linear", "clip_norm": 0}
    train |= sections.pop("train", {})
    return config(pipeline=pipeline, train=train, **sections)


def optimizer_state(built: Built) -> dict[str, Any]:
    state = copy.deepcopy(built.optimizer.state_dict()["state"])
    names = parameter_names(built)
    return {name: state[index] for index, all_names in enumerate(names) for name in all_names}


def outcome(built: Built, losses: list[float], log: str = "") -> dict[str, Any]:
    weights = {
        name: tensor.clone()
        for stage in built.stages
        for name, tensor in module_of(stage).state_dict().items()
    }
    return {
        "losses": losses,
        "weights": weights,
        "common": common_weights(built),
        "optimizer": optimizer_state(built),
        "known": known_samples(built),
        "log": log,
    }


def common_weights(built: Built) -> dict[str, Tensor]:
    """Those of the model that all replicas stand for."""
    stages = common_model(collect(built)).values()
    return {name: tensor.clone() for stage in stages for name, tensor in stage.items()}


def known_samples(built: Built) -> dict[int, int]:
    """How many of the first batch's samples each own cut's forward memory knows."""
    return {
        codec.cut: int((codec.memory.fingerprints(BATCHES[0].ids_B) != 0).sum())
        for codec in (channel.codec for channel in built.engine.channels)
        if codec.memory is not None
    }


def train(
    rank: int, run: RunConfig, root: str, save_at: int | None = None, resume: bool = False
) -> dict[str, Any]:
    built = start(run)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinpipe.launch.checkpoint.reshard").addHandler(handler)
    saved = checkpoints(run, built, rank, root=Path(root))
    first = restore(saved) if resume else 0
    state = outcome(built, [], "\n".join(messages)) if resume else None
    losses, replica = [], built.engine.transport.mesh.replica
    for step in range(first, save_at or len(BATCHES)):
        own = batch(BATCHES[step].ids_B[replica :: run.pipeline.replicas].tolist())
        losses.append(built.engine.train_step(own, step).loss)
        built.lr_schedule.step()
    if save_at:
        saved.save(save_at)
    return {"restored": state, **outcome(built, losses, "\n".join(messages))}


def save(run: RunConfig, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run.world_size, train, run, str(folder), 3)


def resume(run: RunConfig, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run.world_size, train, run, str(folder), None, True)


def _save_and_go_on(rank: int, run: RunConfig, root: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved, and where a run gets that is not interrupted."""
    return train(rank, run, root, save_at=3), train(rank, run, f"{root}/other")


def joined(results: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    return {name: value for result in results for name, value in result[what].items()}


def assert_equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, right[name]), name
        else:
            assert_equal(value, right[name])


def test_training_goes_on_bit_for_bit_at_another_pipeline_degree(tmp_path: Path) -> None:
    tied = {"layers": 4, "width": 16, "heads": 2, "context": 12, "tie_embeddings": "exact"}
    at_three = run_config([1, 3], model=tied)
    saved, through = zip(*run_ranks(3, _save_and_go_on, at_three, str(tmp_path)), strict=True)
    for cuts in ([2], []):
        resumed = resume(run_config(cuts, model=tied), tmp_path)
        restored = [result["restored"] for result in resumed]
        assert_equal(joined(restored, "weights"), joined(saved, "weights"))
        assert_equal(joined(restored, "optimizer"), joined(saved, "optimizer"))
        if cuts:  # one process adds a tied weight's gradients in another order
            assert resumed[0]["losses"] == through[0]["losses"][3:]
            assert_equal(joined(resumed, "weights"), joined(through, "weights"))


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_with_other_devices_per_rank(tmp_path: Path) -> None:
    one, two = (
        run_config([2], boundary=AQSGD, pipeline={"microbatches": 8, "devices_per_rank": devices})
        for devices in (1, 2)
    )
    through = run_ranks(2, train, one, str(tmp_path / "other"))
    for before, now in ((one, two), (two, one)):
        folder = tmp_path / str(now.pipeline.devices_per_rank)
        saved = save(before, folder)
        resumed = resume(now, folder)
        restored = [result["restored"] for result in resumed]
        assert_equal(joined(restored, "optimizer"), joined(saved, "optimizer"))
        assert all(result["known"] == {2: 8} for result in restored)
        assert resumed[0]["losses"] == through[0]["losses"][3:]
        assert_equal(joined(resumed, "weights"), joined(through, "weights"))


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_in_a_learned_transform(tmp_path: Path) -> None:
    boundary = [{way: {"kind": "transform"} for way in ("forward", "backward")}]
    run = run_config([1, 3], boundary=boundary)
    _, through = zip(*run_ranks(3, _save_and_go_on, run, str(tmp_path)), strict=True)
    resumed = resume(run, tmp_path)
    assert resumed[0]["losses"] == through[0]["losses"][3:]
    assert_equal(joined(resumed, "weights"), joined(through, "weights"))


def test_a_schedule_with_several_stages_per_rank_is_resumed_from(tmp_path: Path) -> None:
    interleaved = {"schedule": "Interleaved1F1B", "ranks": 2}
    saved = save(run_config([1, 2, 3], pipeline=interleaved), tmp_path)
    resumed = resume(run_config([]), tmp_path)
    assert_equal(joined([resumed[0]["restored"]], "weights"), joined(saved, "weights"))


def cut_short(part: Path) -> None:
    os.truncate(part, 100)


@pytest.mark.parametrize("harm", [None, Path.unlink, cut_short], ids=["", "lost", "cut short"])
def test_weights_and_optimizer_survive_another_number_of_replicas(
    tmp_path: Path, harm: Callable[[Path], None] | None
) -> None:
    """Those of the first replica, or with a part that is lost, of the first that is whole."""
    saved = save(run_config([2], pipeline={"replicas": 2}), tmp_path)
    if harm is not None:
        (part,) = tmp_path.rglob("replica-0.rank-1.safetensors")
        harm(part)
    resumed = resume(run_config([2], pipeline={"replicas": 1}), tmp_path)
    restored = [result["restored"] for result in resumed]
    assert_equal(joined(restored, "weights"), joined(saved[:2], "weights"))
    assert_equal(joined(restored, "optimizer"), joined(saved[:2], "optimizer"))
    assert "all replicas start from the same weights" in resumed[0]["log"]


@pytest.mark.slow
def test_a_second_replica_starts_from_the_state_of_the_first(tmp_path: Path) -> None:
    cocktail = {"method": "cocktail", "cocktail": COCKTAIL}
    one, two = (
        run_config([2], boundary=AQSGD, gradcomp=cocktail, pipeline={"replicas": replicas})
        for replicas in (1, 2)
    )
    saved = save(one, tmp_path)
    resumed = resume(two, tmp_path)
    for replica in (resumed[:2], resumed[2:]):
        restored = [result["restored"] for result in replica]
        for what in ("weights", "optimizer"):
            assert_equal(joined(restored, what), joined(saved, what))
        assert all(result["known"] == {2: 8} for result in restored)
        assert_equal(joined(replica, "common"), joined(resumed[:2], "common"))
    after, before = (joined(results, "common") for results in (resumed, saved))
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert "sent as first visits" not in resumed[0]["log"]  # the first had all samples


@pytest.mark.slow
def test_differing_replicas_start_from_the_common_model_when_cuts_move(tmp_path: Path) -> None:
    cocktail = {"method": "cocktail", "cocktail": COCKTAIL}
    at_two, at_one = (
        run_config([cut], pipeline={"replicas": 2}, gradcomp=cocktail) for cut in (2, 1)
    )
    saved = save(at_two, tmp_path)
    resumed = resume(at_one, tmp_path)
    for replica in (resumed[:2], resumed[2:]):
        restored = [result["restored"] for result in replica]
        assert_equal(joined(restored, "weights"), joined(saved[:2], "common"))
        assert_equal(joined(replica, "common"), joined(resumed[:2], "common"))
    assert "all replicas start from the same weights" in resumed[0]["log"]


def test_memories_of_cuts_that_stayed_are_kept_and_the_others_start_empty(tmp_path: Path) -> None:
    save(run_config([1, 3], boundary=AQSGD), tmp_path)
    resumed = resume(run_config([2, 3], boundary=AQSGD), tmp_path)
    restored = [result["restored"]["known"] for result in resumed]
    assert restored == [{2: 0}, {2: 0, 3: 8}, {3: 8}]
    assert "the activation cache of cuts [2] starts empty" in resumed[0]["log"]
    assert not resumed[1]["log"]  # logged once


def _expect_error(rank: int, run: RunConfig, root: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        restore(checkpoints(run, start(run), rank, root=Path(root)))
    return str(caught.value)


def test_what_cannot_be_resumed_is_rejected_by_name(tmp_path: Path) -> None:
    save(run_config([2], boundary=AQSGD), tmp_path)
    other_bits = [{**AQSGD[0], "forward": {"kind": "aqsgd", "bits": 3}}]
    (message, _) = run_ranks(2, _expect_error, run_config([2], boundary=other_bits), str(tmp_path))
    assert "with boundary at cut 2: forward.bits = 4, this run has 3" in message
    (tmp_path / "step-3" / "replica-0.rank-1.safetensors").unlink()
    (message,) = run_ranks(1, _expect_error, run_config([], boundary=AQSGD), str(tmp_path))
    assert "replica-0.rank-1.safetensors: missing" in message


@pytest.mark.parametrize(
    ("before", "now", "moved"), [(2, 1, (1, 2)), (1, 2, (0, 2)), (2, 4, (0, 4)), (2, 3, (3, 6))]
)
def test_samples_that_moved_are_counted(before: int, now: int, moved: tuple[int, int]) -> None:
    assert moved_samples(before, now) == moved


def test_tied_copies_that_differ_are_rejected(tmp_path: Path) -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    saved = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    load_module(tied, saved, tmp_path)
    saved["1.weight"] += 1
    with pytest.raises(CheckpointError, match=r"0\.weight and 1\.weight .*keep a cut"):
        load_module(tied, saved, tmp_path)
    del saved["1.bias"]
    with pytest.raises(CheckpointError, match=r"no part has 1\.bias"):
        load_module(tied, saved, tmp_path)


def test_a_layout_is_what_decides_where_things_are() -> None:
    def layout(cuts: list[int], **pipeline: Any) -> Layout:
        return Layout.of({"cuts": cuts, **pipeline})

    assert layout([2]) == layout([2], schedule="GPipe", microbatches=8)
    assert layout([2]) != layout([1])
    assert layout([1, 2, 3], schedule="Interleaved1F1B") != layout([1, 2, 3])
    zbv = layout([1, 2, 3], schedule="ZBVZeroBubble")
    assert zbv.holders == (0, 1, 1, 0)
