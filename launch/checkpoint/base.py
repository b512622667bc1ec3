"""Frozen weights that files hold: a checkpoint has their digests, and they are read again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thinpipe.launch.checkpoint.manifest import CheckpointError

Digests = Mapping[str, str]


def base_of(module: nn.Module) -> Digests:
    """Digests of a stage's parameters that checkpoints leave out, by name."""
    found: Digests = getattr(module, "base", {})
    return found


def saved_state(module: nn.Module) -> dict[str, Tensor]:
    """The rest of a stage: what is trained, and what no file holds."""
    base = base_of(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in base}


def saved_base(state: Mapping[str, Any]) -> dict[str, str]:
    """Digests in a part's state, of all its stages."""
    stages: Mapping[str, Digests] = state.get("base", {})
    return {name: digest for stage in stages.values() for name, digest in stage.items()}


def check_present(
    module: nn.Module, tensors: Mapping[str, Tensor], base: Digests, folder: Path
) -> None:
    """Check that a checkpoint has a stage's tensors, or what is left out of them was read.

    Raises:
        CheckpointError: one is missing, or what was read is not what was left out.
    """
    held = base_of(module)
    common = held.keys() & base.keys()
    differing = sorted(name for name in common if held[name] != base[name])
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise CheckpointError(
            f"{folder}: holds adapters of other weights: {differing[0]}{more} had another digest "
            "when it was saved; restore the files of model.pretrained, or name a copy of them"
        )
    missing = sorted(module.state_dict().keys() - tensors.keys() - common)
    if missing:
        raise CheckpointError(f"{folder}: no part has {', '.join(missing[:4])}")
