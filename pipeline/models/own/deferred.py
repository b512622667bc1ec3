"""Builds a model on the meta device, and later computes the values of any part of it.

While a constructor runs, every operation on tensors is recorded; nothing is computed. The values of
a layer then come from doing again, on the CPU, just the operations that they depend on. So each
rank fills its own layers only, and initialisation is what the constructor says, wherever it says
it. Random operations draw from a generator seeded by the run's seed and their place in the record:
values do not depend on which layers a rank holds. (The idea is torchdistX's deferred_init.)
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from thinpipe.pipeline.models.meta import META, NoDraws

_UNINITIALISED = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class _Ref:
    """Part of a storage, in elements."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Ref":
        storage = tensor.untyped_storage()._cdata
        return cls(storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class _Operation:
    """One operation: which storages it reads and writes, and how to do it again."""

    function: Any
    arguments: Any
    outputs: Any
    reads: frozenset[int]
    writes: frozenset[int]

    random: bool
    fills: bool
    """Whether it gives values to what it writes."""


class _Recorder(NoDraws):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._kept: list[Tensor] = []  # so that no storage's address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        arguments = (args, kwargs or {})
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        reads = {_Ref.of(tensor).storage for tensor in given}
        writes = {_Ref.of(tensor).storage for tensor in results} - reads
        if func._schema.is_mutable:
            writes |= {_Ref.of(tensor).storage for tensor in _written(func, args, kwargs or {})}
        if writes:  # the others look at what is there: a reference says where
            operation = _Operation(
                func,
                tree_map(_freeze, arguments),
                tree_map(_freeze, outputs),
                frozenset(reads),
                frozenset(writes),
                random=torch.Tag.nondeterministic_seeded in func.tags,
                fills=func.overloadpacket.__name__ not in _UNINITIALISED,
            )
            self.operations.append(operation)
            self._kept += [*given, *results]
        return outputs

    @contextmanager
    def truncated_normal(self) -> Iterator[None]:
        """Record `nn.init.trunc_normal_` as a whole: it looks at what it has drawn."""
        draw = nn.init._no_grad_trunc_normal_

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.device != META:
                return draw(tensor, *args, **kwargs)
            storages = frozenset([_Ref.of(tensor).storage])
            arguments = ((_Ref.of(tensor), *args), kwargs)
            operation = _Operation(draw, arguments, (), storages, storages, random=True, fills=True)
            self.operations.append(operation)
            return tensor

        nn.init._no_grad_trunc_normal_ = record
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = draw


class _AsIfReal(TorchFunctionMode):
    """Keeps torch from leaving out what makes no difference to tensors without values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False  # nn.init asks
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            real = func(*args, **{**(kwargs or {}), "device": "cpu"})
            return real.to(META)  # recorded, with its values
        return func(*args, **(kwargs or {}))


def _written(function: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _freeze(value: Any) -> Any:
    """An argument as the record holds it; a tensor with values is a constant."""
    if not isinstance(value, Tensor):
        return value
    return _Ref.of(value) if value.device == META else value.detach().clone()


class DeferredModel:
    """A model without values (`skeleton`, on the meta device), and how to get them."""

    def __init__(self, make: Callable[[], nn.Module], name: str) -> None:
        """`name` is how messages call the constructor."""
        self._name = name
        if isinstance(make, nn.Module):
            raise ValueError(f"{name}: a module; name a function without arguments that returns it")
        recorder = _Recorder()
        try:
            with META, recorder, recorder.truncated_normal(), _AsIfReal():
                self.skeleton = make()
        except Exception as error:
            raise ValueError(
                f"{name}: called without arguments on the meta device, where models are built "
                f"without values, it fails: {type(error).__name__}: {error}; correct it, and let "
                "it not look at values of tensors"
            ) from error
        if not isinstance(self.skeleton, nn.Module):
            raise ValueError(
                f"{name}: returned {type(self.skeleton).__name__}, not a module; "
                "return an nn.Sequential"
            )
        self._operations = recorder.operations

    def fill(
        self,
        modules: Sequence[nn.Module],
        *,
        seed: int,
        device: torch.device | str,
        constants: Mapping[int, float] = MappingProxyType({}),
    ) -> list[nn.Module]:
        """Copies of some modules of the skeleton with their values; what they share stays shared.

        `constants` are values, by ids of tensors of the skeleton, that are the same everywhere in
        a tensor: it takes no memory, is not trained, and is no parameter or buffer of the copy.
        """
        copies: list[nn.Module] = copy.deepcopy(list(modules))
        holders = [
            (path, before, after)
            for original, duplicate in zip(modules, copies, strict=True)
            for (path, before), after in zip(
                original.named_modules(), duplicate.modules(), strict=True
            )
        ]
        for _, before, after in holders:
            for name, tensor in _tensors(before):
                if id(tensor) in constants:
                    one = torch.full((), constants[id(tensor)], dtype=tensor.dtype, device=device)
                    delattr(after, name)
                    after.__dict__[name] = one.expand(tensor.shape)
        if torch.device(device) == META:
            return copies
        places = [
            (f"{type(after).__name__} {path or 'layer'}", after, name, tensor)
            for path, before, after in holders
            for name, tensor in _tensors(before)
            if id(tensor) not in constants
        ]
        wanted = {_Ref.of(tensor).storage for *_, tensor in places if tensor.device == META}
        values = _Values(self._operations, wanted, seed)
        moved: dict[int, Tensor] = {}
        for layer, after, name, tensor in places:
            if tensor.device != META:
                moved[id(tensor)] = getattr(after, name).to(device)
            elif id(tensor) not in moved:
                value = values.of(tensor)
                if value is None:
                    raise ValueError(
                        f"{self._name}: {layer} never gives {name} a value; initialise it in the "
                        "constructor, as with nn.init"
                    )
                value = value.to(device)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                moved[id(tensor)] = value
            setattr(after, name, moved[id(tensor)])
        return copies


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a module holds itself: parameters, buffers, other attributes."""
    own = module.__dict__
    for name, value in {**own, **own["_parameters"], **own["_buffers"]}.items():
        if isinstance(value, Tensor):
            yield name, value


class _Values:
    """Does again, on the CPU, the operations that some storages depend on."""

    def __init__(self, operations: Sequence[_Operation], wanted: set[int], seed: int) -> None:
        self._real: dict[int, Tensor] = {}
        self._filled: set[int] = set()
        needed, chosen = set(wanted), []
        for index in reversed(range(len(operations))):
            if operations[index].writes & needed:
                needed |= operations[index].reads
                chosen.append(index)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for index in reversed(chosen):
                self._repeat(operations[index], f"{seed}/{index}")

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor of the skeleton; None if nothing gave it any."""
        ref = _Ref.of(tensor)
        if ref.storage not in self._filled and tensor.numel():
            return None
        return self._view(ref).detach().clone()

    def _repeat(self, operation: _Operation, name: str) -> None:
        if operation.random:
            digest = hashlib.sha256(name.encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        args, kwargs = tree_map(self._thaw, operation.arguments)
        outputs = operation.function(*args, **kwargs)
        recorded = tree_leaves(operation.outputs)  # none of what is recorded as a whole
        for ref, real in zip(recorded, tree_leaves(outputs), strict=bool(recorded)):
            if isinstance(ref, _Ref) and ref.storage not in self._real:
                self._real[ref.storage] = real
        if operation.fills:
            self._filled |= operation.writes

    def _thaw(self, value: Any) -> Any:
        if isinstance(value, _Ref):
            return self._view(value)
        return torch.device("cpu") if value == META else value

    def _view(self, ref: _Ref) -> Tensor:
        return self._real[ref.storage].as_strided(ref.size, ref.stride, ref.offset)
