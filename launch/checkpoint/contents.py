"""A rank's state in a checkpoint: collected from its parts, and given back to them."""

import logging
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint.base import base_of, check_present, saved_base, saved_state
from thinpipe.launch.checkpoint.reshard import channel_name, module_of, parameter_names
from thinpipe.launch.components import Built

_log = logging.getLogger(__name__)


def collect(built: Built, *, memories: bool = True) -> dict[str, Any]:
    """The whole state; its tensors are mostly those that training changes next.

    Without `memories` (the activation cache), a run cannot resume from it bit for bit.
    """
    gpu_rng = [torch.cuda.get_rng_state(device) for device in _gpus(built)]
    return {
        "model": {str(s.stage_index): saved_state(module_of(s)) for s in built.stages},
        "base": {str(s.stage_index): dict(base_of(module_of(s))) for s in built.stages},
        "global_model": _global_model(built),
        "optimizer": built.optimizer.state_dict(),
        "parameters": parameter_names(built),
        "lr_schedule": built.lr_schedule.state_dict(),
        "best": built.best.state_dict(),
        "engine": built.engine.state_dict(),
        "sync": built.sync.state_dict(),
        "boundaries": {
            channel_name(channel): channel.codec.training.state_dict()
            for channel in built.engine.channels
            if memories
        },
        "rng": torch.random.get_rng_state(),
        "gpu_rng": torch.stack(gpu_rng) if gpu_rng else None,
        "samples": None if built.samples is None else built.samples.state_dict(),
        **_sharded(built),
    }


def snapshot(state: Any, into: Any = None) -> Any:
    """A copy of a state in host memory, which training does not change.

    The tensors of `into`, an earlier copy that is not needed any more, are filled again where they
    fit: new memory takes seven times as long, as the kernel clears it page by page.

    Rows of memories are copies already (`Store.pack`), unless they are on disk: a file's are not
    copied here, so such a state must be written before training continues.
    """
    if isinstance(state, Tensor):
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (state.shape, state.dtype)
        return (into if fits else torch.empty_like(state, device="cpu")).copy_(state.detach())
    if isinstance(state, Mapping):
        before = into if isinstance(into, Mapping) else {}
        return {
            key: value if key == ROWS else snapshot(value, before.get(key))
            for key, value in state.items()
        }
    if type(state) in (list, tuple):
        known = into if isinstance(into, list | tuple) else ()
        pairs = zip_longest(state, known[: len(state)])
        return type(state)(snapshot(value, before) for value, before in pairs)
    return state


def without_rows(copied: Any) -> Any:
    """A copy without the rows of the activation cache, to be filled again."""
    if isinstance(copied, Mapping):
        return {key: without_rows(value) for key, value in copied.items() if key != ROWS}
    if type(copied) in (list, tuple):
        return type(copied)(without_rows(value) for value in copied)
    return copied


def distribute(built: Built, state: Mapping[str, Any], folder: Path) -> None:
    """Give back what `collect` found, and `folder` holds.

    Raises:
        CheckpointError: frozen weights, which are read from files, are not those of then.
    """
    for stage in built.stages:
        module, tensors = module_of(stage), state["model"][str(stage.stage_index)]
        check_present(module, tensors, saved_base(state), folder)
        module.load_state_dict(tensors, strict=not base_of(module))
    for channel in built.engine.channels if state["boundaries"] else ():
        found = state["boundaries"].get(channel_name(channel))
        if found is not None:
            channel.codec.training.load_state_dict(found)
        elif channel.codec.memory is not None:
            _log.warning(
                "%s: no activation cache was saved; its samples are sent as first visits",
                channel_name(channel),
            )
    built.optimizer.load_state_dict(state["optimizer"])
    built.lr_schedule.load_state_dict(state["lr_schedule"])
    built.best.load_state_dict(state.get("best", {}))
    built.engine.load_state_dict(state["engine"])
    built.sync.load_state_dict(state["sync"])
    if built.shards is not None:
        built.shards.load_state_dict(state["shards"])
    if built.samples is not None:
        built.samples.load_state_dict(state["samples"])
    torch.random.set_rng_state(state["rng"])
    if state.get("gpu_rng") is not None:
        for device, rng in zip(_gpus(built), state["gpu_rng"], strict=False):
            torch.cuda.set_rng_state(rng, device)


def _sharded(built: Built) -> dict[str, Any]:
    if built.shards is None:
        return {}
    names = [
        name
        for stage in built.stages
        for name, _ in module_of(stage).named_parameters(remove_duplicate=False)
    ]
    shard = built.engine.transport.mesh.shard
    return {"shard": shard, "divided": names, "shards": built.shards.state_dict()}


def _gpus(built: Built) -> list[torch.device]:
    """Those that hold parameters, the first one first."""
    modules = [module_of(stage) for stage in built.stages]
    devices = dict.fromkeys(p.device for module in modules for p in module.parameters())
    return [device for device in devices if device.type == "cuda"]


def _global_model(built: Built) -> dict[str, Any] | None:
    if built.sync.replicas_equal:
        return None
    with built.sync.global_parameters():
        return {
            str(stage.stage_index): {
                name: weight.clone() for name, weight in saved_state(module_of(stage)).items()
            }
            for stage in built.stages
        }
