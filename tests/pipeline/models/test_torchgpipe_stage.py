"""torchgpipe inside a stage: gradients, samples, precision, and runs with `devices_per_rank`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_ranks
from tests.training import batch, config, train_steps
from thinpipe.launch.build import build_stage
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch, Samples
from thinpipe.pipeline.models.torchgpipe_stage import even_bounds

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CPU = torch.device("cpu")
BATCHES = [batch(list(range(8))), batch([9, 11, 13, 15, 17, 19])]
SINGLES = [batch([0, 1, 2, 3]), batch([9, 11, 13, 15])]
"""One sample for each microbatch, which torchgpipe then does not split."""


def spread(devices: int = 2, **sections: dict[str, Any]) -> RunConfig:
    pipeline = {"devices_per_rank": devices, **sections.pop("pipeline", {})}
    return config(pipeline=pipeline, **sections)


def both(run: RunConfig, stage: int = 0) -> tuple[Any, Any]:
    """A stage on one device and on as many as the run has."""
    return tuple(build_stage(run, stage, [CPU] * n) for n in (1, run.pipeline.devices_per_rank))


def gradients(module: Any, item: Batch, samples: Samples) -> dict[str, torch.Tensor]:
    logits = module(item.inputs_BT, samples)
    F.cross_entropy(logits.flatten(0, 1), item.targets.flatten()).backward()
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_agree_with_torchgpipe(masked: bool) -> None:
    """The same batch through torchgpipe and through one module: GPipe's semantics as oracle."""
    item = BATCHES[0]
    halves = (torch.arange(item.inputs_BT.shape[1]) > 5).expand_as(item.inputs_BT).long()
    samples = Samples(item.ids_B, segments_BT=halves if masked else None)
    found, expected = (
        gradients(module, item, samples) for module in both(spread(3, pipeline={"cuts": []}))
    )
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_names_order_and_places_of_tensors_are_those_of_the_plain_stage() -> None:
    plain, split = both(spread(pipeline={"cuts": []}))
    assert [*split.state_dict()] == [*plain.state_dict()]
    assert [n for n, _ in split.named_parameters()] == [n for n, _ in plain.named_parameters()]
    split.load_state_dict({name: torch.ones_like(w) for name, w in plain.state_dict().items()})
    assert all(bool((p == 1).all()) for part in split._parts for p in part.parameters())


def test_parts_follow_the_mode_and_autocast_of_the_caller() -> None:
    plain, split = both(spread(model={"dropout": 0.5}))
    item = BATCHES[0]
    assert all(not part.stage.training for part in split.eval()._parts)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            split(item.inputs_BT, item.samples), plain.eval()(item.inputs_BT, item.samples)
        )
    assert all(part.stage.training for part in split.train()._parts)


def test_ranges_differ_by_at_most_a_block() -> None:
    assert even_bounds(3, 10, 3) == [3, 5, 7, 10]
    assert even_bounds(0, 2, 2) == [0, 1, 2]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        pytest.param("GPipe", "fp32", marks=pytest.mark.slow),
        pytest.param("1F1B", "fp32", marks=pytest.mark.slow),
        ("Deep1F1B", "bf16"),
    ],
)
def test_training_equals_one_device_per_rank(schedule: str, precision: str) -> None:
    """Bit for bit where a microbatch has one sample; chunks of several are summed one by one."""
    settings = {"schedule": schedule, "precision": precision}
    runs = [spread(n, pipeline=settings) for n in (1, 2)]
    for plain, split in run_ranks(2, train_both, runs):
        assert split[0] == plain[0]
        assert split[1].keys() == plain[1].keys()
        assert all(torch.equal(split[1][name], weight) for name, weight in plain[1].items())
        assert split[2] == pytest.approx(plain[2], rel=1e-5 if precision == "fp32" else 1e-3)


def train_both(
    rank: int, runs: list[RunConfig]
) -> list[tuple[list[float], dict[str, torch.Tensor], list[float]]]:
    """Losses and weights of microbatches of one sample, then losses of larger ones."""
    return [
        (*train_steps(rank, run, SINGLES)[:2], train_steps(rank, run, BATCHES)[0]) for run in runs
    ]
