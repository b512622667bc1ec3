"""Whose samples are whose when the number of replicas changes."""

from pathlib import Path

import pytest
import torch

from tests.launch.run.elastic.trained import write_run
from thinpipe.launch.checkpoint.facts import check_facts
from thinpipe.launch.checkpoint.manifest import CheckpointError, Manifest
from thinpipe.launch.config.run import load_config
from thinpipe.launch.corpus import check_data
from thinpipe.launch.run.sharing import Plan
from thinpipe.pipeline.mesh import Mesh


def mesh(replicas: int, replica: int = 0) -> Mesh:
    return Mesh(1, replicas, replica)


@pytest.fixture
def plans(tmp_path: Path) -> list[Plan]:
    """Two, of three replicas."""
    write_run(tmp_path)
    config = load_config(tmp_path / "run.toml")
    samples = check_data(config).train
    return [Plan(config, samples, mesh(3), None) for _ in range(2)]


def test_replicas_that_do_no_step_leave_no_trace(plans: list[Plan]) -> None:
    """A newcomer is lost before its first step: not all ranks hear of it."""
    for plan in plans:
        plan.share_anew(mesh(2), 3)
    plans[0].share_anew(mesh(3), 7)
    plans[0].share_anew(mesh(2), 7)
    assert plans[0].state == plans[1].state
    assert plans[0].steps == plans[1].steps
    for step in range(plans[0].steps):
        assert torch.equal(plans[0].sampler.ids(step), plans[1].sampler.ids(step))


def test_several_changes_before_one_step_are_one(plans: list[Plan]) -> None:
    plans[0].share_anew(mesh(2), 3)
    for plan in plans:
        plan.share_anew(mesh(1), 3)
    assert plans[0].state == plans[1].state
    assert plans[0].changed_at == 3


def test_a_replica_in_anothers_place_has_its_samples(plans: list[Plan]) -> None:
    plans[0].share_anew(mesh(2, replica=1), 3)
    plans[0].share_anew(mesh(3, replica=1), 3)
    assert plans[0].state == plans[1].state
    assert plans[0].changed_at is None
    assert not torch.equal(plans[0].sampler.ids(5), plans[1].sampler.ids(5))


def test_samples_per_step_are_said_when_they_change(plans: list[Plan], tmp_path: Path) -> None:
    """As replicas are lost, and as those who are left resume with the batch of the run file."""
    plan = plans[0]
    plan.share_anew(mesh(2), 3)
    lost = "samples go to 2 replicas in place of 3, a step takes 4 samples in place of 6: the 102"
    assert plan.words().startswith(lost)
    resumed = resume(plan, tmp_path, 6)
    assert resumed.words().startswith("a step takes 6 samples in place of 4: the 94 samples left")


def test_those_who_are_left_resume_with_the_first_batch_or_the_last(
    plans: list[Plan], tmp_path: Path
) -> None:
    plan = plans[0]
    plan.share_anew(mesh(2), 3)
    data = load_config(tmp_path / "run.toml").data
    for batch in (6, 4):
        check_facts(tmp_path, plan.facts({}), resume(plan, tmp_path, batch).facts({}), data)
    with pytest.raises(CheckpointError, match=r"train\.batch_size = 6"):
        check_facts(tmp_path, plan.facts({}), resume(plan, tmp_path, 8).facts({}), data)
    assert resume(plan, tmp_path, 4).steps == plan.steps


def resume(plan: Plan, folder: Path, batch: int) -> Plan:
    """What two replicas go on with after step 5."""
    changes = ["pipeline.replicas=2", "elastic.min_replicas=1", f"train.batch_size={batch}"]
    config = load_config(folder / "run.toml", changes)
    saved = Manifest(5, 0, 0, plan.facts({}), ())
    return Plan(config, check_data(config).train, mesh(2), saved)
