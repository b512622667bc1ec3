"""A device of its own kind, made of a CPU: its tensors refuse to meet those of the CPU.

Importing this registers the device "fake" with torch, for the whole process: do so in a child. What
a GPU would reject (operations on tensors of two devices) is rejected; what would make the CPU wait
for it (a copy to the host, a number) is counted in `WAITS`, by operation and place.
"""

import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"
ROOT = Path(__file__).parents[1]
WAITS: Counter[str] = Counter()
_COPIES = ("aten::copy_", "aten::_copy_from", "aten::_to_copy")
_INDEXING = ("aten::index", "aten::index_put_")
_new_tensor = torch.tensor


BACKEND = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_amp_supported_dtype=lambda: [torch.bfloat16],
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,  # random numbers are the CPU's
)
"""What torch asks a device's module."""


class FakeTensor(Tensor):
    """A tensor on the device, which holds one on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> "FakeTensor":
        made: FakeTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, *args, **(kwargs or {}))

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(_near(place))

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(_near(place), value)

    def __deepcopy__(self, memo: Any) -> "FakeTensor":
        return FakeTensor(self.raw.detach().clone())  # torch's own looks into the storage

    def tolist(self) -> Any:
        _count_wait("tolist")
        return self.raw.tolist()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: "FakeTensor") -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw


def _near(place: Any) -> Any:
    """Lists as indices on the device, as torch makes them for a GPU."""
    if isinstance(place, list):
        return torch.tensor(place, dtype=None if place else torch.int64, device=NAME)
    return tuple(map(_near, place)) if isinstance(place, tuple) else place


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    made = _new_tensor(data, **options)  # torch's own knows no devices in Python
    return made if device is None else made.to(device)


def _count_wait(what: str) -> None:
    ours = [
        frame
        for frame in traceback.extract_stack()
        if Path(frame.filename).is_relative_to(ROOT)
        and "site-packages" not in frame.filename
        and not frame.filename.endswith("accelerator.py")
    ]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
    WAITS[f"{what} in {place}"] += 1


def _compute(operation: Any, *args: Any, **options: Any) -> Any:
    """Do it on the CPU, with tensors of the device alone."""
    name = operation._schema.name
    given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    strangers = [tensor for tensor in given if not isinstance(tensor, FakeTensor)]
    to_cpu = name == "aten::_to_copy" and torch.device(options.get("device") or NAME).type == "cpu"
    if name not in _COPIES:
        if name in _INDEXING:  # torch uploads indices from the host
            strangers = [t for t in strangers if t.dtype.is_floating_point]
        if any(tensor.dim() for tensor in strangers):
            raise RuntimeError(f"{name}: a tensor on the CPU meets one on {NAME}")
        if "device" in options:
            options["device"] = "cpu"
    out = operation(*tree_map(_raw, args), **tree_map(_raw, options))
    if to_cpu or name == "aten::_local_scalar_dense":
        _count_wait(name)
        return out
    if name == "aten::copy_" and not isinstance(args[0], FakeTensor):
        _count_wait(name)
        return args[0]
    known = {id(tensor.raw): tensor for tensor in given if isinstance(tensor, FakeTensor)}
    return tree_map(lambda x: known.get(id(x), _wrapped(x)) if isinstance(x, Tensor) else x, out)


def _raw(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _wrapped(x: Tensor) -> Tensor:
    return x if isinstance(x, FakeTensor) else FakeTensor(x)


_setup_privateuseone_for_python_backend(NAME, backend_module=BACKEND)
_library = torch.library.Library("_", "IMPL")
_library.fallback(_compute, "PrivateUse1")
torch.tensor = _tensor
