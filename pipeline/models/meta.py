"""Building modules on the meta device, where tensors have no values.

Many operations there are written in Python, and import torch's compiler, which takes a second of
each start. What is here does without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


@contextmanager
def on_meta() -> Iterator[None]:
    """What is made within has no values, and draws from no generator."""
    with META, NoDraws():  # type: ignore[no-untyped-call]
        yield


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """As `to_empty`, which imports the compiler; no parameters may be shared."""
    for part in module.modules():
        for name, held in [*part.named_parameters(recurse=False)]:
            empty = torch.empty(held.shape, dtype=held.dtype, device=device)
            setattr(part, name, nn.Parameter(empty, requires_grad=held.requires_grad))
        for name, kept in [*part.named_buffers(recurse=False)]:
            setattr(part, name, torch.empty(kept.shape, dtype=kept.dtype, device=device))


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out operations that draw into a tensor without values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it imports the compiler to skip it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and func.overloadpacket.__name__.endswith("_") and args[0].device == META:
            return args[0]
        return func(*args, **(kwargs or {}))
