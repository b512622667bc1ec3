"""A nested state in one safetensors file: tensors as tensors, the rest as JSON metadata.

The tree goes into the file's metadata under `thinpipe.state`. JSON values are stored as they are;
other types are an object with one key: `tuple`, `dict` (pairs, so that keys keep their type),
`bytes` (base64), `float` (inf and nan) and `tensor` (a name in the same file).

Files are written in pieces, hashed on the way: a third of the processor time of the library's
`save_file` and a pass over the result, and training's threads run meanwhile. Their format: the
header's length (8 bytes, little endian), a JSON header padded to 8 bytes, the tensors.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from thinpipe.launch.host.disk import flush

_TREE = "thinpipe.state"
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Types that a file can hold, and their names there."""
_LARGEST_HEADER = 100_000_000  # limits that readers accept
_PIECE_NBYTES = 2**22  # hashed, then written: 1.2 s of a core per GiB; a pass for each took 2.6


def save_state(path: Path, state: object) -> str:
    """Write `state` to `path` and flush it; its SHA-256. The same state gives the same bytes.

    A state is a tensor, None, bool, int, float, str, bytes, or a list, tuple or mapping (keys str
    or int) of states. Tensors that share storage are written once each; strides are not kept.
    Takes at most one more copy of `state` in RAM (of tensors that are on a device, share storage
    or are not contiguous).

    Raises:
        TypeError: a value or key of another type; the message gives its path in the tree.
        ValueError: what is no tensor is too much for a file's header.
        OSError: there is no room, or the disk fails.
    """
    packed, tensors = pack_state(state)
    tree = json.dumps(packed, allow_nan=False, separators=(",", ":"))
    return write_tensors(path, tensors, {_TREE: tree})


def pack_state(state: object) -> tuple[Any, dict[str, Tensor]]:
    """The tree of a state, as JSON, and its tensors on the CPU, by name; see `save_state`."""
    packer = _Packer()
    return packer.pack(state, "state"), packer.tensors


def load_state(path: Path, *, mapped: str | None = None) -> Any:
    """Rebuild what `save_state` wrote: tensors on the CPU in their own memory, mappings as dicts.

    Tensors under the key `mapped` stay in the file, for those larger than RAM: copy
    what is needed before the file is removed.

    Raises:
        ValueError: the file was not written by `save_state`, or is too large for this machine.
    """
    try:
        opened: Any = safe_open(path, framework="pt")  # its methods carry no types
    except RuntimeError as error:  # of torch, which maps it: more than RAM and swap is refused
        raise ValueError(
            f"{path}: this machine cannot map it ({error}); resume where RAM and swap are larger"
        ) from error
    with opened as file:
        tree = (file.metadata() or {}).get(_TREE)
        if tree is None:
            raise ValueError(f"{path}: no {_TREE!r} in its metadata; only save_state's files load")

        def take(name: str) -> Tensor:
            # The file is memory-mapped: a view would break once another host prunes the file.
            tensor: Tensor = file.get_tensor(name)
            return tensor if name.endswith(f"[{mapped!r}]") else tensor.clone()

        return unpack_state(json.loads(tree), take)


class _Packer:
    """Turns a state into JSON and collects its tensors, each named by its path in the tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def pack(self, value: object, path: str) -> Any:
        # Exact types only: a subclass (numpy.float64, IntEnum, torch.Size) would lose its type.
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, Tensor):
            self.tensors[path] = self._own(value, path)
            return {"tensor": path}
        return self._pack_container(value, path)

    def _pack_container(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {"dict": [self._pack_item(key, item, path) for key, item in value.items()]}
        if type(value) is list:
            return [self.pack(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": self.pack(list(value), path)}
        raise TypeError(
            f"{path} is a {_type_name(value)}, which a checkpoint cannot hold; convert it to a "
            "tensor, mapping, list, tuple, bytes, str, int, float, bool or None"
        )

    def _pack_item(self, key: object, value: object, path: str) -> Any:
        if type(key) not in (str, int):
            raise TypeError(
                f"{path} has the key {key!r}, a {_type_name(key)}; keys are plain str or int"
            )
        # repr keeps 1 apart from "1", and "a.b" from a then b: no two tensors share a name.
        return [key, self.pack(value, f"{path}[{key!r}]")]

    def _own(self, tensor: Tensor, path: str) -> Tensor:
        plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if not plain or tensor.is_meta or tensor.layout != torch.strided:
            raise TypeError(
                f"{path} is a {_type_name(tensor)} ({tensor.layout}, on {tensor.device}); a "
                "checkpoint holds plain dense tensors with data: use to_local() or to_dense()"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{path} is {tensor.dtype}, which safetensors lacks; convert it first")
        held = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if held.untyped_storage().data_ptr() in self._storages:
            held = held.clone()
        self._storages.add(held.untyped_storage().data_ptr())
        return held


def unpack_state(node: Any, take: Callable[[str], Tensor]) -> Any:
    """The state of a tree; `take` finds a tensor by its name.

    Raises:
        ValueError: an entry is of no known kind.
    """
    if isinstance(node, list):
        return [unpack_state(item, take) for item in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"dict": list(pairs)}:
            return {key: unpack_state(item, take) for key, item in pairs}
        case {"tuple": list(items)}:
            return tuple(unpack_state(item, take) for item in items)
        case {"tensor": str(name)}:
            return take(name)
        case {"bytes": str(text)}:
            return base64.b64decode(text)
        case {"float": str(text)}:
            return float(text)
    raise ValueError(
        f"{_TREE!r} has an entry of unknown kind {sorted(node)}; written by a newer version?"
    )


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write contiguous tensors in host memory, flush them to disk, return the file's SHA-256.

    Equal content gives equal bytes.

    Raises:
        OSError: there is no room, or the disk fails.
        ValueError: names and metadata take more than a reader accepts.
    """
    # wide types first, so that all are aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header = _header({name: tensors[name] for name in order}, metadata)
    hasher = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(header), hasher)
        for name in order:
            flat = tensors[name].detach().flatten().view(torch.uint8)
            _write(file.fileno(), flat.numpy().data, hasher)
        flush(file.fileno())
    return hasher.hexdigest()


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is too large")
    return len(text).to_bytes(8, "little") + text


def _write(descriptor: int, data: memoryview, hasher: "hashlib._Hash") -> None:
    for start in range(0, len(data), _PIECE_NBYTES):
        piece = data[start : start + _PIECE_NBYTES]
        hasher.update(piece)
        while len(piece):
            piece = piece[os.write(descriptor, piece) :]
