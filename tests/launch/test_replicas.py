"""Pipelines side by side: AQ-SGD across the cuts and CocktailSGD between replicas, together."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from tests.huggingface import saved_model, section
from tests.ranks import run_ranks
from tests.training import batch, config, exchange, share, start, weights
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.checkpoint.contents import collect, distribute
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.models.transformer import build_layers

NOWHERE = Path("unused")
"""Where frozen weights would be named from; these models have none."""

pytestmark = pytest.mark.dist

AQSGD: Any = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct"}}]
COCKTAIL = {"subset": 0.5, "topk": 0.3, "bits": 4, "bucket_mb": 0.01, "warmup_steps": 1}
RUN = config(
    pipeline={"cuts": [2], "replicas": 2},
    boundary=AQSGD,
    gradcomp={"method": "cocktail", "cocktail": COCKTAIL},
)
BATCHES = [list(range(8)), list(range(8, 16))] * 3


def train(rank: int, stop_at: int | None) -> Any:
    built, replica = start(RUN), rank // 2
    totals = []
    for step, ids in enumerate(BATCHES):
        if step == stop_at:
            state = collect(built)
            built = start(RUN)
            distribute(built, state, NOWHERE)
        totals.append(built.engine.train_step(share(batch(ids), replica, 2), step))
    held_out = share(batch([50, 51, 52, 53]), replica, 2)
    loss, _ = built.engine.eval_step(held_out, 0, compressed=False)
    state = collect(built)
    (stage,) = state["global_model"]
    return {
        "local": weights(built),
        "global": state["global_model"][stage],
        "losses": [t.loss for t in totals],
        "classes": [(t.wire, t.sync_bytes, t.control_bytes) for t in totals],
        "eval": loss,
    }


@pytest.fixture(scope="module")
def trained() -> Any:
    return run_ranks(4, train, None)


def test_replicas_share_the_global_model_and_nothing_else(trained: Any) -> None:
    for one, other in ((0, 2), (1, 3)):
        for name, weight in trained[one]["global"].items():
            assert torch.equal(weight, trained[other]["global"][name]), name
        assert any(
            not torch.equal(weight, trained[other]["local"][name])
            for name, weight in trained[one]["local"].items()
        )


def test_evaluation_is_that_of_the_global_model(trained: Any) -> None:
    model = build_layers(RUN.model, 0, RUN.model.layers, seed=0, device="cpu")
    model.load_state_dict({**trained[0]["global"], **trained[1]["global"]})
    whole = batch([50, 51, 52, 53])
    with torch.no_grad():
        logits = model(whole.inputs_BT).flatten(0, 1)
    expected = F.cross_entropy(logits, whole.targets.flatten(), reduction="sum")
    assert trained[0]["eval"] == pytest.approx(float(expected), rel=1e-5)


def test_every_class_of_bytes_is_counted_apart(trained: Any) -> None:
    for found in trained:
        assert found["classes"] == trained[0]["classes"]
    wire, sync_bytes, control_bytes = trained[0]["classes"][-1]
    assert [count.direction for count in wire] == ["forward", "backward"]
    assert all(count.nbytes > 0 for count in wire)
    assert 0 < sync_bytes < trained[0]["classes"][0][1] / 5  # the first step averages exactly
    assert control_bytes > 0


def test_a_resumed_run_goes_on_bit_for_bit(trained: Any) -> None:
    for whole, resumed in zip(trained, run_ranks(4, train, 4), strict=True):
        assert whole["losses"] == resumed["losses"]
        for kind in ("local", "global"):
            for name, weight in whole[kind].items():
                assert torch.equal(weight, resumed[kind][name]), name


SMALL: dict[str, Any] = {"bucket_mb": 0.01, "interval": 2, "overlap": 0, "warmup_steps": 2}


def run_of(method: str) -> Any:
    """A smaller run with another method, which exchanges at least every other step."""
    return config(
        model={"layers": 2},
        pipeline={"cuts": [1], "replicas": 2, "microbatches": 2},
        boundary=AQSGD,
        gradcomp=exchange(method, **SMALL),
    )


def train_tied_and_adapted(rank: int, models: dict[str, Any]) -> dict[str, Any]:
    """Of every method and model: losses of three steps, what is trained, the one model's loss."""
    found: dict[str, Any] = {}
    for name, model in models.items():
        for method in method_names():
            run = run_of(method).model_dump(mode="json", exclude_none=True)
            pipeline = {**run["pipeline"], "cuts": []}
            built = start(RunConfig.model_validate({**run, "model": model, "pipeline": pipeline}))
            before = weights(built)
            losses = [
                built.engine.train_step(share(batch(ids), rank, 2), step).loss
                for step, ids in enumerate(BATCHES[:3])
            ]
            built.sync.finish()
            after = weights(built)
            moved = {key for key in after if not torch.equal(after[key], before[key])}
            held_out = share(batch([50, 51]), rank, 2)
            loss, _ = built.engine.eval_step(held_out, 0, compressed=False)
            tied = torch.equal(after["model.transformer.wte.weight"], after["model.lm_head.weight"])
            found[f"{name} {method}"] = (losses, moved, loss, tied)
    return found


@pytest.mark.slow
def test_every_method_trains_tied_weights_and_adapters(tmp_path: Path) -> None:
    """GPT-2, whose head is its embedding; with LoRA the adapters move and nothing else."""
    saved_model("gpt2", tmp_path, vocab_size=256)
    plain, adapted = section("gpt2", tmp_path), section("gpt2", tmp_path, lora={"rank": 2})
    found = run_ranks(2, train_tied_and_adapted, {"tied": plain, "LoRA": adapted})
    for name, (losses, moved, loss, tied) in found[0].items():
        assert all(map(math.isfinite, losses)), name
        assert tied, name
        assert moved, name
        assert name.startswith("tied") or all("lora" in key for key in moved), name
        assert loss == found[1][name][2], name


@pytest.mark.parametrize("method", ["cocktail", "none"])
def test_tied_copies_and_replicas_that_differ_are_rejected(method: str) -> None:
    def tied(**pipeline: Any) -> Any:
        return config(
            model={"tie_embeddings": "exact"}, pipeline=pipeline, gradcomp={"method": method}
        )

    remedy = 'use tie_embeddings = "untied" or a method that exchanges gradients'
    with pytest.raises(ValidationError, match=remedy):
        tied(cuts=[2], replicas=2)
    tied(cuts=[2], replicas=1)
    tied(cuts=[], replicas=2)  # one weight
