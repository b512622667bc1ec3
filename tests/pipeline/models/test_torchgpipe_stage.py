"""torchgpipe as a stage's module, as an oracle for gradients, and as a balancer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import Ranks
from tests.training import batch, config, share, single_process, start, train_steps
from thinpipe.launch.build import engine_options
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.engine import PipelineEngine
from thinpipe.pipeline.models.torchgpipe_stage import LocalPipeline, torchgpipe_balance
from thinpipe.pipeline.models.transformer import build_layers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCHES = [batch(list(range(8))), batch([9, 11, 13, 15, 17, 19])]
CPUS = ["cpu", "cpu"]


def layers_of(run: RunConfig, first: int, stop: int) -> list[nn.Module]:
    return [build_layers(run.model, i, i + 1, seed=0, device="cpu") for i in range(first, stop)]


def test_gradients_agree_with_torchgpipe() -> None:
    """The same batch through torchgpipe and through one module: GPipe's semantics as oracle."""
    run = config()
    oracle = LocalPipeline(layers_of(run, 0, 4), devices=CPUS, balance=[2, 2], chunks=4)
    item = BATCHES[0]
    tokens = item.targets.numel()
    loss = F.cross_entropy(
        oracle(item.inputs_BT).flatten(0, 1), item.targets.flatten(), reduction="sum"
    )
    (loss / tokens).backward()
    whole = build_layers(run.model, 0, 4, seed=0, device="cpu")
    for inputs, targets in zip(
        item.inputs_BT.tensor_split(4), item.targets.tensor_split(4), strict=True
    ):
        part = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        (part / tokens).backward()
    gradients = {n.split(".", 4)[4]: p.grad for n, p in oracle.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)


def train_with_local(rank: int, run: RunConfig, batches: list[Batch]) -> list[float]:
    """Two ranks; each one's module is a torchgpipe pipeline over two (CPU) devices."""
    built = start(run)
    module: Any = LocalPipeline(
        layers_of(run, 2 * rank, 2 * rank + 2), devices=CPUS, balance=[1, 1], chunks=2
    )
    built.stages[0].submod = module
    engine = PipelineEngine(
        built.stages,
        built.engine.mesh,
        engine_options(run),
        optimizer=torch.optim.AdamW(
            module.parameters(), lr=run.train.lr, weight_decay=run.train.weight_decay
        ),
        sync=built.sync,
    )
    return [engine.train_step(share(item, 0, 1), step).loss for step, item in enumerate(batches)]


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Deep1F1B"])
def test_a_stage_may_be_a_torchgpipe_pipeline(ranks: Ranks, schedule: str) -> None:
    run = config(pipeline={"schedule": schedule}, train={"clip_norm": 0})
    found, _ = ranks(2, train_with_local, run, BATCHES)
    expected, _ = single_process(run, BATCHES)
    assert found == pytest.approx(expected, rel=1e-5)
    (plain, _, _), _ = ranks(2, train_steps, run, BATCHES)
    assert found == pytest.approx(plain, rel=1e-5)


def test_zero_bubble_with_torchgpipe_is_refused() -> None:
    run = config()
    module = LocalPipeline(layers_of(run, 0, 2), devices=CPUS, balance=[1, 1], chunks=2)
    with pytest.raises(ValueError, match=r"ZBVZeroBubble.*torchgpipe"):
        PipelineEngine.check_modules("ZBVZeroBubble", [module])
    PipelineEngine.check_modules("GPipe", [module])


@pytest.mark.parametrize("balance", [[1, 2], [2], [0, 2]])
def test_a_balance_that_does_not_fit_is_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="balance = "):
        LocalPipeline([nn.Identity(), nn.Identity()], devices=CPUS, balance=balance, chunks=1)


def test_torchgpipes_balancer_covers_all_layers() -> None:
    run = config()
    found = torchgpipe_balance(
        layers_of(run, 0, 4), BATCHES[0].inputs_BT, partitions=2, timeout_s=0.2
    )
    assert sum(found) == 4
    assert len(found) == 2
