"""Random weights of a cut model: the same whatever the cut."""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's global generator by this seed and name; restore it afterwards."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed also formats a stack for each kind of device: 3 ms for every module
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        yield


def initialise(
    model: Any, *, seed: int, tied_to: Sequence[tuple[str, nn.Module]], read: Set[str] = frozenset()
) -> frozenset[str]:
    """Fill parameters and buffers as the family does, each module by a seed of its name.

    Modules all of whose tensors are in `read` are left as they are: files fill those.

    Buffers that no file holds, such as rotary tables, are filled here too. `tied_to` are name and
    module of the embedding that the head is a copy of, if it is, and then of the modules around it;
    they may have no memory here.
    Returns the names of those that the family's `_init_weights` leaves unset: they hold NaN.
    """
    _erase(model, read)
    head = head_of(model) if tied_to else None
    # Modules before those that hold them, which may fill them in a way of their own.
    for name, module in reversed(list(model.named_modules())):
        if next(_tensors(module), None) is None or (
            hasattr(module, "_init_weights") and next(_tensors(module, recurse=False), None) is None
        ):
            continue  # nothing to fill, or a model, whose parts a cut may have replaced
        if all(f"{name}.{own}".lstrip(".") in read for own, _ in _tensors(module)):
            continue
        if head is not None and module is head:
            _fill_head(model, module, tied_to, seed=seed)
        else:
            with seeded(seed, name):
                model._init_weights(module)
    return frozenset(
        name for name, tensor in _tensors(model) if name not in read and _is_unset(tensor)
    )


def fill_from_constructors(
    model: Any, blocks: str, unset: frozenset[str], *, seed: int, config: Any
) -> frozenset[str]:
    """Give what `_init_weights` left unset the values that the constructor of its block gives.

    `blocks` is the path of the blocks in the whole model, `config` the whole model's. Returns the
    names of what constructors leave unset, too.
    """
    left, held = unset, dict(_tensors(model))
    for index, block in model.get_submodule(blocks).named_children():
        prefix = f"{blocks}.{index}."
        if not any(name.startswith(prefix) for name in left):
            continue
        with seeded(seed, prefix), _new_memory_is_nan():
            try:
                built = type(block)(config, int(index))
            except (AttributeError, TypeError, ValueError):
                continue  # a constructor of another kind: rejected by name, with its parameters
        for name, tensor in _tensors(built):
            if prefix + name in left and not _is_unset(tensor):
                held[prefix + name].data.copy_(tensor)
                left -= {prefix + name}
    return left


@contextlib.contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that unset parameters show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def head_of(model: Any) -> Any:
    """The head, if this part of the model has it."""
    try:
        return model.get_output_embeddings()
    except AttributeError:  # a family that looks into the head, where a cut has replaced it
        return None


def _fill_head(
    model: Any, head: Any, tied_to: Sequence[tuple[str, nn.Module]], *, seed: int
) -> None:
    """Fill a head as its embedding is; modules around that may fill it in a way of their own."""
    embedding: Any = tied_to[0][1]
    embedding.weight = head.weight  # shared: filling the one fills the other
    for name, module in tied_to:
        with seeded(seed, name):
            model._init_weights(module)
    if getattr(head, "bias", None) is not None:
        nn.init.zeros_(head.bias)


_UNSET = torch.iinfo(torch.int64).min  # of integer buffers, as NaN of floats


@torch.no_grad()
def _erase(model: nn.Module, read: Set[str]) -> None:
    """Put NaN where `_init_weights` has yet to put values: unset memory may hold anything."""
    for name, tensor in _tensors(model):
        if name in read:
            continue
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
        elif tensor.dtype == torch.int64:
            tensor.fill_(_UNSET)


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True  # codes get memory when they are read
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype == torch.int64 and bool((tensor == _UNSET).any())


def _tensors(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(recurse=recurse)
    yield from model.named_buffers(recurse=recurse)
