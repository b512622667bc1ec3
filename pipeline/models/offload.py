"""What a GPU holds only while it is used, and RAM else: activations and the optimizer's state.

Activations go to pinned memory as the forward saves them, and come back as the backward reads them,
by torch's hooks and on the stream of the compute. The optimizer steps over some parameters at a
time, whose state comes for that and goes again.
"""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

_SMALLEST_NBYTES = 1 << 12  # a smaller tensor stays: moving it takes longer than it is worth
_AT_ONCE = 1 << 22
"""Values of the parameters that the optimizer steps over together, if one does not have more."""
_SAME_VALUES = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0")
"""What a weight goes through before it is multiplied."""


class ActivationsInRam(save_on_cpu):
    """A context in which what autograd keeps of a forward lies in RAM, but for weights."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        super().__init__(pin_memory=device.type == "cuda")
        held = {
            _place(weight)
            for module in modules
            for weight in chain(module.parameters(), module.buffers())
        }
        to_ram, back = self.pack_hook, self.unpack_hook

        def pack(tensor: Tensor) -> Any:
            stays = tensor.nbytes < _SMALLEST_NBYTES or tensor.device.type == "cpu"
            stays = stays or _place(tensor) in held or _is_weight(tensor)
            return tensor if stays else to_ram(tensor)

        self.pack_hook = pack
        self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else back(kept)


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a weight, maybe in another shape or dtype: all microbatches share it."""
    if isinstance(tensor, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        ((node, _),) = node.next_functions
    return isinstance(getattr(node, "variable", None), nn.Parameter)


class StateInRam:
    """An optimizer whose state lies in RAM between its steps; it must treat each parameter alone.

    What it keeps elsewhere than its parameter, as AdamW the number of steps, stays there. What it
    counts by group counts once for all parts of the group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._buffers: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._loaded: dict[int, dict[str, Any]] = {}
        optimizer.register_load_state_dict_pre_hook(self._take_state)
        optimizer.register_load_state_dict_post_hook(self._give_state)

    def step(self) -> None:
        groups = self._optimizer.param_groups
        whole, before = [group["params"] for group in groups], [_settings(each) for each in groups]
        after = list(before)
        try:
            for number, parameters in enumerate(whole):
                for few in _in_parts(parameters):
                    for group, settings in zip(groups, before, strict=True):
                        _put(group, [], settings)
                    groups[number]["params"] = few
                    self._step_over(few)
                    after[number] = _settings(groups[number])
        finally:
            for group, parameters, settings in zip(groups, whole, after, strict=True):
                _put(group, parameters, settings)
        if self._device.type == "cuda":  # what is saved or compared next is read on the host
            torch.cuda.current_stream(self._device).synchronize()

    def _step_over(self, parameters: list[nn.Parameter]) -> None:
        state = self._optimizer.state
        for parameter in parameters:
            for name in state.get(parameter, {}):
                if (parameter, name) in self._buffers:
                    held = state[parameter][name]
                    state[parameter][name] = held.to(parameter.device, non_blocking=True)
        self._optimizer.step()
        for parameter in parameters:
            for name, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.device == parameter.device:
                    state[parameter][name] = self._to_ram(parameter, name, value)

    def _to_ram(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        buffer = self._buffers.get((parameter, name))
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            pinned = self._device.type == "cuda"
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            self._buffers[parameter, name] = buffer
        return buffer.copy_(value, non_blocking=True)

    def _take_state(self, _: Any, saved: dict[str, Any]) -> dict[str, Any]:
        """torch would put all of it on the device at once."""
        self._loaded = saved["state"]
        return {**saved, "state": {}}

    def _give_state(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, its in self._loaded.items():
            parameter = parameters[index]
            for name, value in its.items():
                # of one value: AdamW's number of steps, which is on the CPU anyway
                moves = isinstance(value, Tensor) and value.dim() > 0
                kept = self._to_ram(parameter, name, value) if moves else value
                optimizer.state[parameter][name] = kept
        self._loaded = {}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Those of a group, and what it counts there."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _put(group: dict[str, Any], parameters: list[nn.Parameter], settings: dict[str, Any]) -> None:
    group.clear()
    group |= {"params": parameters, **copy.deepcopy(settings)}


def _in_parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(each.numel() for each in part) >= _AT_ONCE:
            yield part
            part = []
    if part:
        yield part
