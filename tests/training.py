"""A small run, as ranks and as one process, for tests that compare the two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from thinpipe.gradcomp.registry import load_method
from thinpipe.launch.build import build
from thinpipe.launch.checkpoint.reshard import Layout
from thinpipe.launch.checkpoint.resume import choose
from thinpipe.launch.checkpoint.state import Checkpoints
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.net.ranks.session import Session
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.models.transformer import build_layers
from thinpipe.pipeline.orders import ZERO_BUBBLE, fit_microbatches
from thinpipe.pipeline.step_stats import StepTotals
from thinpipe.pipeline.wire.told import ScheduleName

WIDTH, TOKENS, VOCAB = 16, 12, 256
RAW = {"kind": "raw"}
TORCH_2_13 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="needs torch >= 2.13"
)
"""For zero-bubble schedules and `pipeline.shards`, which are rejected before."""
SCHEDULES = [
    pytest.param(name, marks=TORCH_2_13 if name in ZERO_BUBBLE else ())
    for name in get_args(ScheduleName)
]


def config(**sections: dict[str, Any]) -> RunConfig:
    """A tiny model, or one from a folder; sections are merged over these values."""
    base: dict[str, Any] = {
        "model": {"layers": 4, "width": WIDTH, "heads": 2, "context": TOKENS},
        "data": {"sequence_length": TOKENS},
        "pipeline": {"cuts": [2], "microbatches": 4, "peer_timeout_s": 120, "device": "cpu"},
        "boundary": [{"forward": RAW, "backward": RAW}],
        "train": {"batch_size": 8, "warmup_steps": 0, "decay": "none"},
    }
    if {"pretrained", "config"} & sections.get("model", {}).keys():
        base["model"] = {}  # it has its own shape
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(base)


def exchange(method: str, **wanted: Any) -> dict[str, Any]:
    """The section [gradcomp] of a method, with those of the wanted settings that it has."""
    fields = load_method(method).Config.model_fields
    return {"method": method, method: {n: v for n, v in wanted.items() if n in fields}}


def batch(ids: list[int], tokens: int = TOKENS) -> Batch:
    """Samples whose content depends on their id alone."""
    rows = []
    for sample in ids:
        generator = torch.Generator().manual_seed(sample)
        rows.append(torch.randint(VOCAB, (TOKENS + 1,), generator=generator)[: tokens + 1])
    tokens_BT = torch.stack(rows)
    return Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous(), torch.tensor(ids))


def start(run: RunConfig, *, timeout_s: float = 120) -> Built:
    """This rank's part of a run; call it on all ranks."""
    pipeline = run.pipeline
    transport = GlooTransport(
        pipeline.pipeline_ranks, pipeline.replicas, timeout_s=timeout_s, shards=pipeline.shards
    )
    torch.manual_seed(0)
    return build(run, transport, run_id=7, total_steps=100)


def weights(built: Built) -> dict[str, torch.Tensor]:
    """All weights of this rank's stages by name."""
    states = [stage.submod.state_dict() for stage in built.stages]
    return {name: w.detach().clone() for state in states for name, w in state.items()}


def train_steps(
    rank: int,
    run: RunConfig,
    batches: list[Batch],
    check: Callable[[Built, StepTotals], Any] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Losses, final weights of this rank, and what `check` said after every step."""
    built = start(run)
    dp_rank = built.engine.transport.mesh.dp_rank
    losses, seen = [], []
    for step, whole in enumerate(batches):
        totals = built.engine.train_step(share(whole, dp_rank, run.pipeline.dp_size), step)
        losses.append(totals.loss)
        seen.append(check(built, totals) if check else None)
    return losses, weights(built), seen


def checkpoints(
    run: RunConfig, built: Built, rank: int = 0, *, root: Path | None = None, store: Any = None
) -> Checkpoints:
    """Those of a rank of a run, which agree over the `store`."""
    session = Session(store, built.engine.transport, 7, rank)
    facts = {"config": run.shared(), "data": "same"}
    folder = root or run.run.path / "checkpoints"
    return Checkpoints(folder, run.updated(checkpoint={"keep": 9}), built, session, facts)


def restore(saves: Checkpoints) -> int:
    """Restore the newest whole step; the steps done."""
    layout = Layout.of(saves.facts["config"]["pipeline"])
    return saves.resume(choose(saves._session, saves._root, None, layout))


def share(whole: Batch, replica: int, replicas: int) -> Batch:
    """A replica's contiguous part of a batch."""
    return whole.split(replicas)[replica]


def single_process(run: RunConfig, batches: list[Batch]) -> tuple[list[float], dict[str, Any]]:
    """The same run without a pipeline: same parts, microbatches, loss, clipping and optimizer."""
    torch.manual_seed(0)
    model = build_layers(run.model, 0, run.model.layers, seed=run.run.seed, device="cpu")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=run.train.lr,
        betas=run.train.betas,
        weight_decay=run.train.weight_decay,
    )
    losses = []
    for whole in batches:
        counted, total = int((whole.targets != -100).sum()), 0.0
        for part in _microbatches(run, whole):
            with torch.autocast("cpu", torch.bfloat16, enabled=run.pipeline.precision == "bf16"):
                logits = model(part.inputs_BT, part.samples)
                loss = F.cross_entropy(
                    logits.flatten(0, -2).float(), part.targets.flatten(), reduction="sum"
                )
                loss = loss / float(counted)
            loss.backward()
            total += loss.item()
        losses.append(total)
        if run.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: w.detach() for name, w in model.state_dict().items()}


def _microbatches(run: RunConfig, whole: Batch) -> list[Batch]:
    found: list[Batch] = []
    for part in whole.split(min(run.train.accumulate, len(whole))):
        count = fit_microbatches(
            run.pipeline.schedule,
            wanted=run.pipeline.microbatches,
            samples=len(part),
            ranks=run.pipeline.pipeline_ranks,
        )
        found += part.split(count)
    return found[::-1] if run.pipeline.schedule == "LoopedBFS" else found  # as their backwards
