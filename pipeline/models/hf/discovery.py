"""How a family is cut, found by trying.

The base model runs with its blocks replaced by markers and its embeddings shortened, so that it
takes no memory: what runs before the first marker belongs to the first stage, what runs after the
last one to the last. Then it runs as three stages. At every marker hidden states, and whatever else
a block is given (masks, positions, rotary tables), must equal those of the uncut run bit for bit:
a family that scales embeddings outside of them, or gives blocks what only the first stage knows, is
rejected. What blocks do inside is theirs; `self_check.py` compares that too.

Axes: B samples, T tokens, D width.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinpipe.pipeline.models.hf.families import (
    KNOWN,
    Family,
    Substitute,
    keep_blocks,
    replace_modules,
)
from thinpipe.pipeline.models.hf.init import initialise
from thinpipe.pipeline.models.hf.masks import takes_types
from thinpipe.pipeline.models.stand_in import StandIn

_ROWS = 64  # of a shortened embedding
_TOKENS, _PADDING = 7, 2  # of a trial; its second sequence is padded, so that masks count
_FAILURES = (
    *(AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError),
    ValueError,
)
_SINGLE_BLOCKS = 8  # so many stages of one block are tried, too
_RECURRENT = re.compile(r"mamba|rwkv|xlstm|recurrent|rglru|griffin", re.IGNORECASE)
_REMEDY = "train a model of another family (docs/huggingface.md has a table)"


def find_family(model: Any) -> Family:
    """How to cut a whole model, which lies on the meta device; `model` is used up.

    Raises:
        ValueError: it cannot be cut, or has state-space layers.
    """
    if model.config.model_type in KNOWN:
        return KNOWN[model.config.model_type]
    base = model.base_model
    path = _find_blocks(base)
    kinds = [type(part).__name__ for part in base.get_submodule(path).modules()]
    recurrent = next(filter(_RECURRENT.search, kinds), None)
    if recurrent is not None:
        raise _rejection(
            base,
            f"it has state-space or recurrent layers ({recurrent}), which carry a state through "
            "padding and from one packed example to the next",
        )
    trial = _Trial(base, path)
    family = trial.family()
    layers = len(trial.markers)
    middle = layers // 2
    bounds = [(0, middle), (middle, layers), (1, layers - 1)]
    bounds += [(index, index + 1) for index in range(min(layers, _SINGLE_BLOCKS))]
    for first, stop in (ends for ends in bounds if ends[0] < ends[1]):
        problem = trial.try_stage(family, first, stop)
        if problem is not None:
            raise _rejection(base, f"when cut, {problem}")
    return family


def _find_blocks(base: Any) -> str:
    layers = int(base.config.num_hidden_layers)
    sizes: dict[str, int] = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    }
    if not sizes:
        raise _rejection(base, f"it has no list of {layers} blocks (num_hidden_layers)")
    return max(sizes, key=sizes.__getitem__)


@dataclass(frozen=True)
class _Call:
    block: int
    hidden_BTD: Tensor
    others: tuple[Tensor, ...]


class _Marker(StandIn):
    def forward(self, hidden_BTD: Tensor, *arguments: Any, **settings: Any) -> Any:
        others = tuple(_tensors([arguments, settings]))
        self._log.append(_Call(self._index, hidden_BTD, others))
        out_BTD = 0.5 * hidden_BTD + (self._index + 1)
        if self._returns == "tensor":
            return out_BTD
        # what a block gives to the next one besides hidden states would be lost at a cut
        return (out_BTD, torch.tensor([self._index])) if self._returns == "pair" else (out_BTD,)


@dataclass
class _Part:
    """A module outside the blocks, as it ran."""

    path: str
    at: int  # number of markers that had run
    changes_hidden: bool  # it was given hidden states
    out: Any


class _Trial:
    """A base model with markers for blocks; `calls` are those of its uncut run."""

    def __init__(self, base: Any, path: str) -> None:
        self.base, self.path = base, path
        self.markers: list[_Marker] = []
        self.calls: list[_Call] = []
        self._log: list[_Call] = []
        names = path.split(".")
        self._owners = [".".join(names[:depth]) for depth in range(len(names))]
        self._blocks = list(self.base.get_submodule(self.path))
        self._place([nn.Identity() for _ in self._blocks])
        _shorten_embeddings(self.base)
        self.base.to_empty(device="cpu")
        for name in initialise(self.base, seed=0, tied_to=()):
            # NaN equals nothing; a weight that nothing sets is rejected where it is trained
            owner, _, own = name.rpartition(".")
            getattr(self.base.get_submodule(owner), own).data.fill_(1)
        self.base.eval()
        generator = torch.Generator().manual_seed(0)
        highest = min(_ROWS, int(self.base.config.vocab_size))
        shape = (2, _TOKENS)
        self._ids_BT = torch.randint(min(5, highest - 1), highest, shape, generator=generator)
        mask_BT = torch.ones(2, _TOKENS, dtype=torch.int64)
        mask_BT[1, -_PADDING:] = 0
        self._embedding: Any = self.base.get_input_embeddings()
        self._types: dict[str, Tensor] = {}
        if takes_types(self.base):  # only the first stage is given them
            self._types["token_type_ids"] = torch.arange(_TOKENS).expand(2, _TOKENS) % 2
        self._settings: dict[str, Any] = {"attention_mask": mask_BT, "return_dict": True}
        if "use_cache" in inspect.signature(self.base.forward).parameters:
            self._settings["use_cache"] = False

    def family(self) -> Family:
        """Run uncut, and tell from the order of calls what belongs to the ends."""
        parts = self._run_whole()
        first: dict[str, Substitute] = {}
        last: dict[str, Substitute] = {}
        shared = []
        for path, module in self._outside():
            found = [part for part in parts if part.path == path]
            hidden = [part for part in found if self._is_hidden(part.out)]
            places = {part.at for part in found}
            if places == {len(self.markers)}:
                keeps_tokens = bool(hidden) and hidden[0].out.ndim == 3
                last[path] = "identity" if keeps_tokens else "none"
            elif places == {0} and hidden:
                first[path] = self._substitute(module, found[0])
            elif hidden:
                raise _rejection(self.base, f"{path} changes hidden states at several places")
            elif any(True for _ in module.parameters()):
                shared.append(path)
        return Family(self.path, first, last, tuple(shared))

    def try_stage(self, family: Family, first: int, stop: int) -> str | None:
        """Run blocks `first` to `stop - 1` as a stage would; return what differs, if anything."""
        inputs = {"inputs_embeds": self.calls[first].hidden_BTD}
        if first == 0:
            inputs = {"input_ids": self._ids_BT}
        expected = self._out_BTD if stop == len(self.markers) else self.calls[stop].hidden_BTD
        try:
            with self._cut(family, first, stop):
                out_BTD = self._run(**inputs)
        except _FAILURES as error:
            return f"its forward fails ({type(error).__name__}: {error})"
        for got, wanted in zip(self._log, self.calls[first:stop], strict=True):
            where = f"block {wanted.block}"
            if not torch.equal(got.hidden_BTD, wanted.hidden_BTD):
                return f"hidden states change outside its blocks, before {where}"
            if len(got.others) != len(wanted.others) or not all(
                map(torch.equal, got.others, wanted.others)
            ):
                return f"{where} is given other masks, positions or states than in the whole model"
        return None if torch.equal(out_BTD, expected) else "hidden states change outside its blocks"

    def _run_whole(self) -> list[_Part]:
        """Run with blocks that return a tensor, or a tuple, whichever the family expects."""
        problem = "its forward does not run"
        for returns in ("tensor", "pair", "tuple"):
            self.markers = [
                _Marker(block, _index=index, _log=self._log, _returns=returns)
                for index, block in enumerate(self._blocks)
            ]
            self._place(self.markers)
            parts: list[_Part] = []
            with self._watched(parts):
                try:
                    self._out_BTD = self._run(input_ids=self._ids_BT)
                except _FAILURES as error:
                    problem = f"its forward fails on text ({type(error).__name__}: {error})"
                    continue
            self.calls = list(self._log)
            shapes = [list(call.hidden_BTD.shape) for call in self.calls]
            width = shapes[0][-1] if shapes else 0
            if [call.block for call in self.calls] == list(range(len(self._blocks))) and all(
                shape == [2, _TOKENS, width] for shape in shapes
            ):
                return parts
            problem = f"blocks are given hidden states of shapes {shapes[:2]}, not [B, T, D]"
        raise _rejection(self.base, problem)

    @torch.no_grad()
    def _run(self, **inputs: Tensor) -> Tensor:
        self._log.clear()
        if "input_ids" in inputs:
            inputs |= self._types
        out_BTD: Tensor = self.base(**inputs, **self._settings).last_hidden_state
        return out_BTD

    @contextmanager
    def _watched(self, parts: list[_Part]) -> Iterator[None]:
        def watch(path: str, module: nn.Module) -> Any:
            def note(_module: nn.Module, given: Any, settings: Any, out: Any) -> None:
                hidden = any(
                    t.is_floating_point() and t.ndim == 3 for t in _tensors([given, settings])
                )
                parts.append(_Part(path, len(self._log), hidden, out))

            return module.register_forward_hook(note, with_kwargs=True)

        hooks = [watch(path, module) for path, module in self._outside()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        for owner in self._owners:
            for name, module in self.base.get_submodule(owner).named_children():
                path = f"{owner}.{name}".lstrip(".")
                if path not in self._owners and path != self.path:
                    yield path, module

    def _is_hidden(self, out: Any) -> bool:
        widths = (self.calls[0].hidden_BTD.shape[-1], self._embedding.embedding_dim)
        return isinstance(out, Tensor) and out.is_floating_point() and out.shape[-1] in widths

    def _substitute(self, module: nn.Module, part: _Part) -> Substitute:
        if part.changes_hidden or module is self._embedding:
            return "identity"
        takes = inspect.signature(module.forward).parameters
        return "inputs" if "inputs_embeds" in takes else "zero"

    def _place(self, blocks: Any) -> None:
        self.base.set_submodule(self.path, nn.ModuleList(blocks))

    @contextmanager
    def _cut(self, family: Family, first: int, stop: int) -> Iterator[None]:
        substitutes = family.first if first else {}
        if stop < len(self.markers):
            substitutes = {**substitutes, **family.last}
        before = {path: self.base.get_submodule(path) for path in substitutes}
        kinds = getattr(self.base.config, "layer_types", None)
        try:
            keep_blocks(self.base, family, first, stop)
            replace_modules(self.base, substitutes)
            yield
        finally:
            for path, module in before.items():
                parent, _, name = path.rpartition(".")
                setattr(self.base.get_submodule(parent), name, module)
            self._place(self.markers)
            if kinds and self.base.config.layer_types is not kinds:
                self.base.config.layer_types = kinds


def _shorten_embeddings(base: nn.Module) -> None:
    for module in base.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings > _ROWS:
            module.num_embeddings = _ROWS
            module.weight = nn.Parameter(torch.empty(_ROWS, module.embedding_dim, device="meta"))
            if module.padding_idx is not None and module.padding_idx >= _ROWS:
                module.padding_idx = None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _rejection(base: Any, problem: str) -> ValueError:
    return ValueError(
        f"model_type = {base.config.model_type!r} cannot be cut: {problem}; {_REMEDY}"
    )
