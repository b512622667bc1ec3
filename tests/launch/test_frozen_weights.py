"""LoRA's frozen weights in fewer bytes: training, checkpoints, other cuts, export."""

import importlib.util
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.single_process import in_process
from tests.huggingface import saved_model
from tests.launch.checkpoint.test_base import (
    lora_run,
    resumed,
    saved_names,
    step,
    trained_and_saved,
)
from tests.often import mostly_slow
from tests.training import weights
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.config.run import RunConfig, load_run
from thinpipe.launch.memory.model import rank_memory
from thinpipe.launch.trained.export_hf import export
from thinpipe.launch.trained.export_peft import export_adapter
from thinpipe.launch.trained.model import load, start_from_run
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.hf import quantized
from thinpipe.pipeline.models.hf.quantized import QuantizedLinear
from thinpipe.pipeline.models.hf.weight_formats import _check_range

FORMATS = ["bf16", "nf4", "int8"]
MOSTLY = mostly_slow(FORMATS, {"bf16", "nf4"}.__contains__)


def bf16_run(
    folder: Path, cuts: list[int], name: str = "llama", weights: str | None = None, **model: Any
) -> RunConfig:
    return lora_run(folder, cuts, name, pipeline={"precision": "bf16"}, weights=weights, **model)


def save_in_bf16(name: str, folder: Path) -> None:
    saved_model(name, folder)
    for file in folder.glob("*.safetensors"):
        narrow = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        save_file(narrow, file, {"format": "pt"})


def losses_of(run: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    with in_process(run, total_steps=9) as built:
        losses = [step(built, number, run.model.classes) for number in range(3)]
        return losses, {n: t for n, t in weights(built).items() if ".lora_" in n}


@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "llama-tied", "gpt2", "bert", "gemma3"], "llama-tied".__eq__)
)
def test_bf16_files_train_the_same_bits_as_with_fp32_weights(name: str, tmp_path: Path) -> None:
    save_in_bf16(name, tmp_path / "source")
    narrow = bf16_run(tmp_path, [2, 4], name)
    assert narrow.model.weights == "bf16"  # by default
    wide = bf16_run(tmp_path, [2, 4], name, weights="fp32")
    assert wide.model.weights == "fp32"
    (losses, trained), (expected, reference) = losses_of(narrow), losses_of(wide)
    assert losses == expected
    assert trained.keys() == reference.keys()
    assert trained
    for key, tensor in trained.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, reference[key]), key
    if name == "gemma3":  # whose embedding scales in its weight's dtype: it stays in fp32
        return
    less = [own.weights for own in rank_memory(narrow)]
    assert all(a < 0.75 * b.weights for a, b in zip(less, rank_memory(wide), strict=True))


@pytest.mark.parametrize("form", MOSTLY)
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"activation_checkpointing": True}, marks=pytest.mark.slow)]
)
def test_a_run_resumes_bit_for_bit_also_with_other_cuts(
    form: str, more: dict[str, Any], tmp_path: Path
) -> None:
    run = bf16_run(tmp_path, [2, 4], "llama-tied", weights=form, **more)
    losses, after = trained_and_saved(run)
    assert all(".lora_" in name for name in saved_names(run))
    assert load_run(run.run.path).model == run.model
    for cuts in ([2, 4], []):
        with resumed(bf16_run(tmp_path, cuts, "llama-tied", weights=form, **more)) as built:
            assert [step(built, number) for number in (2, 3)] == losses, cuts
            for name, tensor in weights(built).items():
                if ".lora_" in name:
                    assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("form", mostly_slow(FORMATS, {"nf4", "int8"}.__contains__))
def test_what_is_counted_is_what_a_stage_holds(form: str, tmp_path: Path) -> None:
    run = bf16_run(tmp_path, [2, 4], weights=form)
    counted = [own.weights for own in rank_memory(run)]
    with in_process(run, total_steps=9) as built:
        held = [held_nbytes(module_of(stage)) for stage in built.stages]
    assert counted == held


def held_nbytes(module: torch.nn.Module) -> int:
    """Without tables of codes, which have one size."""
    found = sum(p.nbytes for p in module.parameters())
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            scales = part._scales
            found += scales.nbytes if isinstance(scales, Tensor) else scales.absmax.nbytes
            found += 0 if isinstance(scales, Tensor) else scales.state2.absmax.nbytes
    return found


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                found = StorageWeakRef(storage)
                self._live[found.cdata] = found, storage.nbytes()
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.nbytes = max(self.nbytes, sum(nbytes for _, nbytes in self._live.values()))
        return out


@pytest.mark.parametrize("form", ["fp32", *MOSTLY])
def test_no_rank_holds_its_stage_in_fp32_while_it_loads(form: str, tmp_path: Path) -> None:
    whole = saved_model("llama", tmp_path / "source")
    wide = sum(p.nbytes for p in whole.parameters())
    largest = max(p.nbytes for p in whole.parameters())
    run = bf16_run(tmp_path, [], weights=form)
    _ = run.model.build(0, 6, seed=0, device="meta")  # what is made once
    with _Peak() as peak:
        stage = run.model.build(0, 6, seed=0, device="cpu")
    assert held_nbytes(stage) <= peak.nbytes < held_nbytes(stage) + 3 * largest
    assert (peak.nbytes < 0.9 * wide) == (form != "fp32")


@pytest.mark.parametrize("form", MOSTLY)
def test_exports_give_the_model_that_was_trained(form: str, tmp_path: Path) -> None:
    run = bf16_run(tmp_path, [3], weights=form)
    trained_and_saved(run)
    tokens = torch.arange(12)[None] % 250
    merged = load(run.run.path)
    assert all(p.dtype == torch.float32 for p in merged.parameters())
    with torch.no_grad():
        logits = merged(tokens).logits
    whole = bf16_run(tmp_path, [], weights=form)
    with resumed(whole) as built, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        module: Any = module_of(built.stages[0])
        own = module.eval()(tokens, Samples(torch.arange(1)))
    assert (own.float() - logits).abs().max() < 0.02 * logits.abs().max()
    export(run.run.path, tmp_path / "merged", step=None, dtype="source")
    files = [load_file(file) for file in (tmp_path / "merged").glob("*.safetensors")]
    stored = {name: tensor for file in files for name, tensor in file.items()}
    for name, tensor in merged.state_dict().items():
        assert torch.equal(stored[name], tensor), name
    export_adapter(run.run.path, tmp_path / "adapter", step=None, dtype="source")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter
    assert all(tensor.dtype == torch.float32 for tensor in adapter.values())


@pytest.mark.parametrize("form", mostly_slow(FORMATS, "nf4".__eq__))
def test_adapters_may_go_on_over_the_same_base_in_another_dtype(form: str, tmp_path: Path) -> None:
    run = bf16_run(tmp_path, [3], weights=form)
    trained_and_saved(run)
    new = bf16_run(tmp_path, [3], weights="fp32", from_run=str(run.run.path))
    new = new.updated(run={"folder": str(tmp_path / "new")})
    with in_process(new, total_steps=9) as built:
        assert "weights of step 2" in (start_from_run(built, new) or "")


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [*product(["bert", "opt", "phi", "mixtral", "qwen3-next"], ["nf4", "int8"])],
        {("bert", "int8"), ("mixtral", "nf4")}.__contains__,
    ),
    ids="-".join,
)
def test_families_train_from_codes(case: tuple[str, str], tmp_path: Path) -> None:
    name, form = case
    lora = {"rank": 2, **({"targets": ["out_proj"]} if name == "qwen3-next" else {})}
    run = bf16_run(tmp_path, [3], name, form, lora=lora)
    losses, trained = losses_of(run)
    wide, _ = losses_of(bf16_run(tmp_path, [3], name, "fp32", lora=lora))
    assert losses == pytest.approx(wide, rel=0.02)
    assert losses != wide
    assert any(t.any() for n, t in trained.items() if "lora_B" in n)


def test_a_model_without_linear_layers_is_rejected(tmp_path: Path) -> None:
    run = bf16_run(tmp_path, [3], "gpt2", "nf4")
    message = 'model.weights = "nf4": the blocks of gpt2 have no nn.Linear'
    for check in (run.model.check_files, lambda: rank_memory(run)):
        with pytest.raises(ValueError, match=re.escape(message)):
            check()


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bf16_run(tmp_path, [3], weights="nf4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r'pip install "thinpipe\[quantized\]"; or use "bf16"'):
        run.model.check_files()


@pytest.mark.parametrize(
    ("model", "precision", "message"),
    [
        ({"weights": "bf16"}, "fp32", 'model.weights = "bf16" with pipeline.precision = "fp32"'),
        ({"weights": "nf4", "lora": None}, "bf16", "without lora all are trained"),
        ({"weights": "nf4"}, "fp32", 'model.weights = "nf4" with pipeline.precision = "fp32"'),
        ({"weights": "int8", "config": "SAME"}, "bf16", "quantizes what files hold"),
        ({"weights": "fp16"}, "bf16", "Input should be 'fp32', 'bf16', 'nf4' or 'int8'"),
    ],
)
def test_what_cannot_be_is_rejected_by_name(
    model: dict[str, Any], precision: str, message: str, tmp_path: Path
) -> None:
    model = {k: str(tmp_path / "source") if v == "SAME" else v for k, v in model.items()}
    with pytest.raises(ValidationError, match=re.escape(message)):
        lora_run(tmp_path, [3], pipeline={"precision": precision}, **model)


def test_shards_keep_fp32(tmp_path: Path) -> None:
    pipeline = {"precision": "bf16", "shards": 2}
    assert lora_run(tmp_path, [3], pipeline=pipeline).model.weights is None
    message = 'model.weights = "bf16" with pipeline.shards = 2: shards exchange weights in fp32'
    with pytest.raises(ValidationError, match=re.escape(message)):
        lora_run(tmp_path, [3], pipeline=pipeline, weights="bf16")


@pytest.mark.parametrize(
    ("form", "value", "fits"),
    [("int8", 7e4, False), ("int8", 6e4, True), ("nf4", 7e4, True), ("nf4", math.nan, False)],
)
def test_values_that_codes_cannot_hold_are_rejected_by_name(
    form: Any, value: float, fits: bool
) -> None:
    values = torch.tensor([[1.0, value]])
    if fits:
        _check_range("layers.0.q_proj.weight", values, form)
    else:
        with pytest.raises(ValueError, match=r"layers\.0\.q_proj\.weight: a value of .* use model"):
            _check_range("layers.0.q_proj.weight", values, form)


def test_codes_that_are_made_piece_by_piece_are_those_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    monkeypatch.setattr(quantized, "_PIECE", 1 << 10)
    values_OI = torch.randn(100, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    layers = {}
    for form in ("nf4", "int8"):
        layers[form] = QuantizedLinear(nn.Linear(37, 100, bias=False, device="meta"), form)
        layers[form].quantize(values_OI)
    codes, scales = functional.quantize_4bit(
        values_OI.float(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(layers["nf4"].weight, codes)
    whole = functional.dequantize_4bit(codes, scales).bfloat16()
    assert torch.equal(layers["nf4"].plain_weight(), whole)
    codes, scales, _ = functional.int8_vectorwise_quant(values_OI.half())
    assert torch.equal(layers["int8"].weight, codes)
    plain = functional.int8_vectorwise_dequant(codes, scales).bfloat16()
    assert torch.equal(layers["int8"].plain_weight(), plain)
