"""The table of dtypes in docs/concepts.md is what a run does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.single_process import in_process
from tests.launch.checkpoint.test_base import lora_run, step
from thinpipe.gradcomp.registry import load_method
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.components import Built
from thinpipe.pipeline.config import RawConfig
from thinpipe.pipeline.loss import NextToken

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.uint8: "4 bits",  # two in one
}
COLUMNS = [("fp32", None), ("bf16", None), ("bf16", "int8"), ("bf16", "nf4")]
"""Precision, and `model.weights`."""
Seen = dict[str, set[str]]


def table() -> dict[str, list[str]]:
    section = PAGE.read_text(encoding="utf-8").split("## Precision")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return {what: cells for what, *cells in lines[2:]}


@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_a_run_has_the_dtypes_of_the_table(
    column: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision, form = COLUMNS[column]
    if form is not None:
        pytest.importorskip("bitsandbytes")
    run = lora_run(tmp_path, [3], pipeline={"precision": precision}, weights=form)
    run = run.with_train(clip_norm=1e-6)
    seen: Seen = {}
    with in_process(run, total_steps=9) as built:
        _note_weights(built, seen)
        _watch_stages(built, seen)
        _watch_step(built, seen, monkeypatch)
        step(built, 0)
        step(built, 1)
    _note(seen, "moments of AdamW", *_moments(built))
    seen["values of `raw` messages, by default"] = {RawConfig().format}
    options: Any = load_method("allreduce").Config()
    seen["sums of replicas' gradients, by default"] = {options.format}
    assert seen == {what: {cells[column]} for what, cells in table().items()}


def _note(seen: Seen, what: str, *tensors: Tensor) -> None:
    seen.setdefault(what, set()).update(NAMES[tensor.dtype] for tensor in tensors)


def _watch_stages(built: Built, seen: Seen) -> None:
    hidden = "hidden states between blocks, and at cuts"

    def products(_m: nn.Module, _a: Any, out: Tensor) -> None:
        _note(seen, "products of linear layers", out)

    def states(_m: nn.Module, _a: Any, out: Tensor) -> None:
        _note(seen, hidden, out)

    def at_cut(_m: nn.Module, _a: Any, out: Tensor) -> None:
        _note(seen, hidden, out)
        out.register_hook(lambda grad: _note(seen, "gradients of hidden states at cuts", grad))

    stages: list[Any] = [module_of(stage) for stage in built.stages]
    stages[0].register_forward_hook(at_cut)
    for stage in stages:
        for block in stage.parts():
            block.register_forward_hook(states)
        for name, module in stage.named_modules():
            if name.endswith(("base_layer", "down_proj")):
                module.register_forward_hook(products)


def _note_weights(built: Built, seen: Seen) -> None:
    stages: list[Any] = [module_of(stage) for stage in built.stages]
    for stage in stages:
        blocks = {id(parameter) for block in stage.parts() for parameter in block.parameters()}
        for parameter in stage.parameters():
            if parameter.requires_grad:
                _note(seen, "trained weights", parameter)
            elif parameter.dim() > 1 and id(parameter) in blocks:
                _note(seen, "LoRA's frozen linear layers of blocks", parameter)
            elif parameter.dim() > 1:
                _note(seen, "its other frozen matrices", parameter)
            else:
                _note(seen, "frozen vectors (norms, biases)", parameter)


def _watch_step(built: Built, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    real_loss, real_norm, real_scale = NextToken.loss_sum, torch._foreach_norm, torch._foreach_mul_

    def loss_sum(self: NextToken, logits: Tensor, targets: Any) -> Tensor:
        found = real_loss(self, logits, targets)
        _note(seen, "logits", logits)
        _note(seen, "sum of the losses", found)
        return found

    def norm(*args: Any, **kwargs: Any) -> Any:
        found = real_norm(*args, **kwargs)
        _note(seen, "gradient norm", *found)
        return found

    def scale(tensors: Any, factor: Any) -> None:
        if isinstance(factor, float):  # else the optimizer's
            _note(seen, "clipping", *tensors)
        real_scale(tensors, factor)

    def before_step(optimizer: Any, _a: Any, _k: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        _note(seen, "gradients of weights", *(p.grad for p in held))

    monkeypatch.setattr(NextToken, "loss_sum", loss_sum)
    monkeypatch.setattr(torch, "_foreach_norm", norm)
    monkeypatch.setattr(torch, "_foreach_mul_", scale)
    built.optimizer.register_step_pre_hook(before_step)


def _moments(built: Built) -> list[Tensor]:
    states = built.optimizer.state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
