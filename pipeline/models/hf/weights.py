"""A stage's own weights from a model folder: only its tensors, only from files that hold them."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinpipe.pipeline.models.hf.families import Family
from thinpipe.pipeline.models.hf.layouts import Layout, match_names
from thinpipe.pipeline.models.hf.shards import INDEX, SINGLE, ShardError, Shards

_log = logging.getLogger(__name__)

Put = Callable[[str, Tensor, Tensor], None]


class Sources:
    """The files and names that the tensors of a whole model have on disk."""

    def __init__(self, shards: Shards, whole: Any, family: Family) -> None:
        """`whole` is the uncut model, which may lie on the meta device."""
        self.shards = shards
        base = whole.base_model_prefix
        self._blocks = re.compile(rf"(?:{base}\.)?{re.escape(family.blocks)}\.(\d+)\.")
        self._layers = int(whole.config.num_hidden_layers)
        self._optional = _optional_names(whole)
        self._copies = _copies(whole)
        self._model, self._whole = whole, whole.state_dict()
        matched = match_names(shards.files, whole)
        for stored, name in matched.unknown.items():
            self._check_layer(stored, name)
        self.on_disk, self.layouts = matched.plain, matched.layouts
        self._converted = {name: layout for layout in self.layouts for name in layout.produces}

    def names(self, model: Any) -> frozenset[str]:
        """Parameters of a cut (or whole) model that `load` fills."""
        return frozenset(
            name
            for name in model.state_dict()
            if any(n in self.on_disk or n in self._converted for n in self._alike(name))
        )

    def load(self, model: Any, put: Put) -> None:
        """Fill the parameters of a cut (or whole) model.

        `put` is given the name of each, the parameter and its values. Task heads and poolers that
        the folder lacks keep their random values, and are logged.

        Raises:
            ShardError: a tensor is missing, unreadable or of another shape.
        """
        wanted: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        converted: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in model.state_dict().items():
            source = self._source(name)
            if source is not None:
                wanted[source].append((name, tensor))
            elif (known := self._known(name)) is not None:
                converted[self._converted[known].target][name] = tensor
            elif name not in self._optional:
                raise self._missing(name)
            else:
                _log.warning("%s is not in %s: it starts random", name, self.shards.folder)
        with torch.no_grad():
            for source, stored in self.shards.read(list(wanted)):
                for name, tensor in wanted[source]:
                    self._check_shape(source, name, list(stored.shape), list(tensor.shape))
                    put(name, tensor, stored)
            for layout in self.layouts:
                if layout.target in converted:
                    self._load_converted(layout, converted[layout.target], put)

    def check(self) -> None:
        """Check every tensor of the whole model by the files' headers; needs all files.

        Raises:
            ShardError: a tensor or file is missing, damaged or of another shape.
        """
        shapes = self.shards.shapes(list(self.on_disk.values()))
        for name, tensor in self._whole.items():
            source = self._source(name)
            if source is not None:
                self._check_shape(source, name, shapes[source], list(tensor.shape))
            elif self._known(name) is None and name not in self._optional:
                raise self._missing(name)
        for layout in self.layouts:
            shapes = self.shards.shapes(layout.stored)
            stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            self._convert(layout, stored)

    def _load_converted(self, layout: Layout, tensors: dict[str, Tensor], put: Put) -> None:
        made = self._convert(layout, dict(self.shards.read(layout.stored)))
        for name, tensor in tensors.items():
            put(name, tensor, made[self._known(name) or name])

    def _convert(self, layout: Layout, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        first = layout.stored[0]
        try:
            made = layout.from_disk(stored, self._model)
        except ValueError as error:
            raise ShardError(
                f"{self._file(first)}: {error}: {first} and its like do not fit together; use the "
                "weights that belong to this config.json"
            ) from error
        for name in layout.produces:
            if name not in made:
                raise self._missing(name)
            wanted = list(self._whole[name].shape)
            self._check_shape(first, name, list(made[name].shape), wanted)
        return made

    def _known(self, name: str) -> str | None:
        """The parameter itself, or a copy of it, if a layout produces it."""
        return next((n for n in self._alike(name) if n in self._converted), None)

    def _source(self, name: str) -> str | None:
        return next((self.on_disk[n] for n in self._alike(name) if n in self.on_disk), None)

    def _alike(self, name: str) -> tuple[str, ...]:
        """The parameter, then what is one weight with it: files may hold either."""
        return (name, *self._copies.get(name, ()))

    def _check_layer(self, stored: str, name: str) -> None:
        block = self._blocks.match(name)
        if block is not None and int(block[1]) >= self._layers:
            raise ShardError(
                f"{self._file(stored)}: holds {stored}, but config.json has only "
                f"{self._layers} layers; use the config.json that belongs to these weights"
            )

    def _missing(self, name: str) -> ShardError:
        block = self._blocks.match(name)
        known = [*self.on_disk, *self._converted]
        held = [int(found[1]) for each in known if (found := self._blocks.match(each))]
        if block is not None and held and int(block[1]) > max(held):
            why = (
                f"config.json has {self._layers} layers, the files hold {max(held) + 1}; use the "
                "config.json that belongs to these weights"
            )
        else:
            why = "no file holds it; use the weights that belong to this config.json"
        index = INDEX if (self.shards.folder / INDEX).is_file() else SINGLE
        return ShardError(f"{self.shards.folder / index}: {name} is missing: {why}")

    def _check_shape(self, source: str, name: str, stored: list[int], wanted: list[int]) -> None:
        if stored == wanted:
            return
        why = (
            f"but config.json gives {name} {wanted}; use the config.json that belongs to these "
            "weights"
        )
        if name in self._optional:
            why = (
                f"and model.classes needs {wanted}: the files hold a head of another task; set "
                "model.classes to its number, or take it out of them"
            )
        raise ShardError(f"{self._file(source)}: {source} has shape {stored}, {why}")

    def _file(self, stored: str) -> str:
        return str(self.shards.folder / self.shards.files[stored])


def tied_names(whole: Any) -> dict[str, str]:
    """Parameters that are a copy of an earlier one, and which."""
    first: dict[int, str] = {}
    parameters = whole.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(p), name) for name, p in parameters}
    return {name: source for name, source in names.items() if name != source}


def _copies(whole: Any) -> dict[str, list[str]]:
    """All names of every tied parameter, by each of them."""
    groups: dict[str, list[str]] = {}
    for name, source in tied_names(whole).items():
        groups.setdefault(source, [source]).append(name)
    return {name: names for names in groups.values() for name in names}


def differing_copies(shards: Shards, whole: Any) -> list[str]:
    """Parameters that config.json ties to another one, but files hold with other values.

    transformers uses both then, and so do we.
    """
    tied = tied_names(whole)
    on_disk = match_names(shards.files, whole).plain if tied else {}
    return [
        name
        for name, source in tied.items()
        if name in on_disk and source in on_disk
        if not shards.same(on_disk[name], on_disk[source])
    ]


def _optional_names(whole: Any) -> set[str]:
    """Tensors that a model trained for another task may lack: a classifier and its pooler."""
    if not type(whole).__name__.endswith("ForSequenceClassification"):
        return set()
    base = whole.base_model_prefix + "."
    return {
        name
        for name in whole.state_dict()
        if not name.startswith(base) or name.startswith(base + "pooler.")
    }
