"""Random weights of a cut model: the same whatever the cut."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's global generator by this seed and name; restore it afterwards."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        yield


def initialise(model: Any, *, seed: int, tied_to: tuple[str, nn.Embedding] | None) -> None:
    """Fill every parameter and buffer as the family does, each module by a seed of its name.

    Buffers that no file holds, such as rotary tables, are filled here too. `tied_to` is the name
    of the embedding that the head is a copy of, and that embedding; it may have no memory here.
    """
    for name, module in model.named_modules():
        if not _holds_tensors(module):
            continue
        if tied_to is not None and module is model.get_output_embeddings():
            name, embedding = tied_to
            with seeded(seed, name):
                model._init_weights(_as_embedding(module, embedding))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        else:
            with seeded(seed, name):
                model._init_weights(module)


def _as_embedding(head: Any, embedding: nn.Embedding) -> nn.Embedding:
    weight = head.weight.detach()  # shared: filling the one fills the other
    rows, width = weight.shape
    return nn.Embedding(rows, width, padding_idx=embedding.padding_idx, _weight=weight)


def _holds_tensors(module: nn.Module) -> bool:
    parameters = module.parameters(recurse=False)
    return any(True for _ in parameters) or any(True for _ in module.buffers(recurse=False))
