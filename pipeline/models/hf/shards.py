"""Folders of safetensors files: which file holds which tensor, read and written one at a time."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PIECE_NUMEL = 2**24  # compared at a time: 64 MiB of each in fp32, however large the tensor
_LFS = b"version https://git-lfs"
_AGAIN = "copy or download the file again"
_READABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class ShardError(ValueError):
    """A weight file cannot be used: names the file, the tensor and the remedy."""


@dataclass
class Shards:
    """The weight files of a model folder."""

    folder: Path

    @cached_property
    def files(self) -> dict[str, str]:
        """File of every tensor, by its name on disk.

        Raises:
            ShardError: the folder holds no safetensors weights, or its index is damaged.
        """
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ShardError(f"{index}: not an index of tensors: {error}; {_AGAIN}") from error
        if not (self.folder / SINGLE).is_file():
            raise ShardError(
                f"{self.folder}: holds neither {SINGLE} nor {INDEX}; save the model there with "
                "save_pretrained (older formats: load and save it once with transformers), or use "
                "model.config for random weights"
            )
        with _open(self.folder / SINGLE, "all tensors") as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name on disk, tensor), file by file; only files that hold one of `names`.

        Raises:
            ShardError: a file is missing or truncated, lacks its tensor, or holds it in a dtype
                that is not a float.
        """
        # What was read of a mapped file stays resident until it is closed: one tensor at a time.
        for name in sorted(names, key=self.files.__getitem__):
            for _, piece in self._pieces([name]):
                yield name, piece[:] if piece.get_shape() else piece[...]

    def shapes(self, names: Collection[str]) -> dict[str, list[int]]:
        """Shapes of some tensors; opens every file, reads only headers."""
        return {name: piece.get_shape() for name, piece in self._pieces(names)}

    def dtypes(self, names: Collection[str]) -> dict[str, torch.dtype]:
        """Dtypes of some tensors.

        Raises:
            ShardError: as `read`.
        """
        return {name: _READABLE[piece.get_dtype()] for name, piece in self._pieces(names)}

    def _pieces(self, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        """(name on disk, safetensors' slice), file by file."""
        by_file = defaultdict(list)
        for name in names:
            by_file[self.files[name]].append(name)
        for file_name, wanted in sorted(by_file.items()):
            path = self.folder / file_name
            with _open(path, wanted[0]) as file:
                held = set(file.keys())
                for name in wanted:
                    if name not in held:
                        raise ShardError(
                            f"{path}: lacks {name}, which {INDEX} places there; {_AGAIN}"
                        )
                    piece = file.get_slice(name)
                    if piece.get_dtype() not in _READABLE:
                        raise ShardError(
                            f"{path}: {name} is stored as {piece.get_dtype()}; weights to train "
                            f"are {', '.join(_READABLE)}: use the model's unquantized files"
                        )
                    yield name, piece

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold equal values; reads them a piece at a time."""
        paths = [self.folder / self.files[name] for name in (one, other)]
        with _open(paths[0], one) as first, _open(paths[1], other) as second:
            left, right = first.get_slice(one), second.get_slice(other)
            shape = left.get_shape()
            if right.get_shape() != shape:
                return False
            rows = max(1, _PIECE_NUMEL // max(1, math.prod(shape[1:])))
            return all(
                torch.equal(left[start : start + rows].float(), right[start : start + rows].float())
                for start in range(0, shape[0], rows)
            )

    def digest(self) -> str:
        """SHA-256 of names and files of all tensors: equal on hosts with copies of one model."""
        text = json.dumps(self.files, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def write_shards(folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Write every tensor to its file of `files` (tensor -> file name), and an index if needed.

    Raises:
        ShardError: a file cannot be written.
    """
    by_file: dict[str, dict[str, Tensor]] = defaultdict(dict)
    storages = set[int]()
    for name, tensor in tensors.items():
        held = tensor.contiguous()
        place = held.untyped_storage().data_ptr()
        # a file may hold a tied weight under both names, but safetensors takes each memory once
        by_file[files[name]][name] = held.clone() if place in storages else held
        storages.add(place)
    for file_name, part in by_file.items():
        try:
            save_file(part, folder / file_name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ShardError(
                f"{folder / file_name}: not written: {error}; free disk space"
            ) from error
        (folder / file_name).chmod(folder.stat().st_mode & 0o666)  # safetensors: for the owner only
    if set(by_file) != {SINGLE}:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: files[name] for name in sorted(tensors)},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _begins_with(path: Path, text: bytes) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(text)) == text
    return False


def _open(path: Path, wanted: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ShardError(
            f"{path}: missing, though {INDEX} places {wanted} there; {_AGAIN}"
        ) from None
    except (SafetensorError, OSError) as error:
        if _begins_with(path, _LFS):
            raise ShardError(
                f"{path}: Git LFS has not downloaded it yet; run `git lfs pull` in its folder"
            ) from None
        raise ShardError(
            f"{path}: truncated or damaged ({error}), and {wanted} should be there; {_AGAIN}"
        ) from error
    except RuntimeError as error:  # of torch, which maps files: more than RAM and swap is refused
        raise ShardError(
            f"{path}: this machine cannot map a file of {path.stat().st_size / 1e9:.1f} GB "
            f'({error}); save the model in smaller ones: save_pretrained(max_shard_size="5GB")'
        ) from error
