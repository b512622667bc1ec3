"""How a module with a forward of its own is cut between the blocks of a list, found by trying.

It runs once on the meta device, where every block's output is replaced by a new tensor. From the
graph that autograd records follows what each part of the forward depends on: which parameters
outside of the blocks, and which block's output. A cut may lie where what follows needs nothing of
what was before but the last block's output. What needs no parameters, such as masks, every stage
computes by itself, as all of them know the inputs. `forward_check.py` compares values, too.

Axes: B samples, T tokens, D width.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_REMEDY = "let it call the blocks of one nn.ModuleList one after the other, each once"


class Returned(NamedTuple):
    """What a block returns: where hidden states are among its values, and the others' shapes."""

    leaves: tuple[Any, ...]
    spec: Any
    hidden: int

    @classmethod
    def of(cls, output: Any, where: str) -> "Returned":
        """Raises ValueError if there are no hidden states."""
        leaves, spec = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1:
                return cls(tuple(leaves), spec, index)
        raise ValueError(
            f"{where} returns {type(output).__name__}, in which there are no hidden states; let it "
            "return them as a tensor, or first in a tuple"
        )

    def around(self, hidden: Tensor) -> Any:
        """The same with other hidden states, and zeros for other tensors."""
        leaves = tree_map_only(
            Tensor, lambda leaf: torch.zeros_like(leaf, device=hidden.device), list(self.leaves)
        )
        leaves[self.hidden] = hidden
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Cutting:
    """How a module is cut.

    `layers_of` says, by the name of a parameter outside of the blocks, the first and the last layer
    that it is used with; `why_not` where it cannot be cut, and why. `outputs` is what the whole
    returns, on the meta device.
    """

    path: str
    returned: tuple[Returned, ...]
    layers_of: Mapping[str, tuple[int, int]]
    why_not: Mapping[int, str]
    outputs: Any

    @property
    def count(self) -> int:
        return len(self.returned)

    def holds(self, name: str, first: int, stop: int) -> bool:
        """Whether the stage of blocks `first` to `stop - 1` holds this parameter."""
        if name.startswith(f"{self.path}."):
            return first <= int(name.removeprefix(f"{self.path}.").partition(".")[0]) < stop
        return first <= self.layers_of[name][0] < stop


def find_blocks(model: nn.Module, where: str) -> str:
    """The path of the list of blocks: that with the most parameters.

    Raises:
        ValueError: there is none of at least two.
    """
    sizes: dict[str, int] = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if path and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    if not sizes:
        raise ValueError(
            f"{where}: {type(model).__name__} has no list of blocks to cut between; put its blocks "
            "into an nn.ModuleList, or return an nn.Sequential"
        )
    return max(sizes, key=sizes.__getitem__)


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def trace(model: nn.Module, path: str, inputs: Any, where: str) -> Cutting:
    """How a module on the meta device, whose blocks are at `path`, is cut for such inputs.

    Raises:
        ValueError: its forward does not run there, or not block after block.
    """
    seen = _Seen(model, path, where)
    args, kwargs = call_of(inputs)
    try:
        with seen.watching(), torch.enable_grad():
            outputs = model(*args, **kwargs)
    except _OtherOrderError as error:
        raise ValueError(f"{where}: {error}; {_REMEDY}") from None
    except Exception as error:
        raise ValueError(
            f"{where}: its forward fails on the meta device, where sizes of messages are computed: "
            f"{type(error).__name__}: {error}; make inputs fit, and let it not look at values"
        ) from error
    count = len(seen.blocks)
    if len(seen.returned) != count:
        raise ValueError(
            f"{where}: its forward calls {len(seen.returned)} of the {count} blocks in {path}; "
            f"{_REMEDY}"
        )
    seen.used.append(seen.leaves_of(tree_leaves(outputs)))
    layers_of, why_not = seen.placed()
    return Cutting(path, tuple(seen.returned), layers_of, why_not, outputs)


class _OtherOrderError(Exception):
    """Blocks are not called one after the other."""


@dataclass
class _Seen:
    """What one run of a forward shows; `used[k]` are the leaves that block k's inputs depend on."""

    model: nn.Module
    path: str
    where: str
    returned: list[Returned] = field(default_factory=list)
    used: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = list(self.model.get_submodule(self.path).children())
        self.outside = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not name.startswith(f"{self.path}.")
        }
        self._made: dict[int, tuple[int, bool, Tensor]] = {}
        """By id of a leaf: the block that returned it, whether as hidden states; and the leaf."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        training = self.model.training
        frozen = [p for p in self.outside.values() if p.is_floating_point() and not p.requires_grad]
        hooks = []
        for index, block in enumerate(self.blocks):
            hooks.append(block.register_forward_pre_hook(self._entering(index), with_kwargs=True))
            hooks.append(block.register_forward_hook(self._leaving(index)))
        self.model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in frozen:
                parameter.requires_grad_(False)
            self.model.train(training)

    def leaves_of(self, tensors: list[Any]) -> set[int]:
        """Ids of the leaves that some tensors were computed from."""
        found, seen = set[int](), set[Any]()
        left: list[Any] = [
            get_gradient_edge(tensor).node
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        while left:
            function = left.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            if hasattr(function, "variable"):
                found.add(id(function.variable))
            left += [following for following, _ in function.next_functions]
        return found

    def placed(self) -> tuple[dict[str, tuple[int, int]], dict[int, str]]:
        """`layers_of` and `why_not` of a `Cutting`."""
        last = len(self.blocks) - 1
        why_not: dict[int, str] = {}
        names = {id(parameter): name for name, parameter in self.outside.items()}
        layers: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for name, parameter in block.named_parameters(f"{self.path}.{index}"):
                names.setdefault(id(parameter), name)
                layers.setdefault(id(parameter), []).append(index)
        for part, leaves in enumerate(self.used):
            user = f"block {part}" if part <= last else "what follows the blocks"
            for leaf in leaves - self._made.keys():
                layers.setdefault(leaf, []).append(min(part, last))
            for leaf, (maker, is_hidden, _) in self._made.items():
                if leaf not in leaves:
                    continue
                what = "what block {} returns" if is_hidden else "a second value of block {}"
                for cut in range(maker + 1 + is_hidden, min(part, last) + 1):
                    why_not.setdefault(cut, f"{user} uses {what.format(maker)}, before the cut")
        for leaf, name in names.items():
            found = layers.get(leaf, [0])
            for cut in range(min(found) + 1, max(found) + 1):
                why_not.setdefault(
                    cut, f"parameter {name} is used by layers {min(found)} and {max(found)}"
                )
        of = {id(p): layers.get(id(p), [0]) for p in self.outside.values()}
        return {n: (min(of[id(p)]), max(of[id(p)])) for n, p in self.outside.items()}, why_not

    def _entering(self, index: int) -> Any:
        def note(_block: nn.Module, args: Any, kwargs: Any) -> None:
            if index != len(self.returned):
                raise _OtherOrderError(
                    f"its forward calls block {index} after {len(self.returned)} blocks"
                )
            self.used.append(self.leaves_of(tree_leaves((args, kwargs))))

        return note

    def _leaving(self, index: int) -> Any:
        def replace(_block: nn.Module, _args: Any, output: Any) -> Any:
            values = tree_map_only(Tensor, Tensor.detach, output)
            returned = Returned.of(values, f"{self.where}: block {index}")
            self.returned.append(returned)
            leaves = list(returned.leaves)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    leaves[place] = torch.empty_like(leaf).requires_grad_()
                    self._made[id(leaves[place])] = (index, place == returned.hidden, leaves[place])
            return tree_unflatten(leaves, returned.spec)

        return replace
