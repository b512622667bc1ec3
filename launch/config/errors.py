"""What pydantic finds wrong with a file, in the words of the file: key, value, remedy."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from thinpipe.launch.config.model import MODEL_TAGS

_WORDS = {
    "greater_than": "use a number greater than {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use a number less than {lt}",
    "less_than_equal": "use {le} or less",
    "finite_number": "give a finite number",
    "string_type": "give text, in quotes",
    "string_too_short": "give some text",
    "literal_error": "use {expected}",
    "union_tag_invalid": "use {expected_tags}",
    "tuple_type": "write a list, as in [1, 2]",
    "too_short": "give at least {min_length}",
    "too_long": "give at most {max_length}",
    "missing": "give one more",
    "model_type": "write it as a table",
    "model_attributes_type": "write it as a table",
    "dict_type": "write it as a table",
    "byte_size": 'write a size, as in "8GB" or "512MiB"',
    "byte_size_unit": 'write a size, as in "8GB" or "512MiB"',
}
_KINDS = {"int": "give a whole number", "float": "give a number", "bool": "use true or false"}


def explain(error: ValidationError, root: type[BaseModel], *above: str) -> list[str]:
    """A line for every place in the table of which `root` is the model, `above` its own path."""
    found: dict[str, list[_Mistake]] = {}
    for detail in error.errors():
        mistake = _explain(detail, _find(detail, root, above))
        found.setdefault(mistake.name, []).append(mistake)
    return [
        _join(mistakes)
        for name, mistakes in found.items()
        if not any(other.startswith(f"{name}.") for other in found)  # of a union: the one it is
    ]


class _Mistake(NamedTuple):
    """What is wrong at a place, with its value if that helps, and what to do; `sure` is whether it
    holds even if another member of a union would not have it.
    """

    name: str
    what: str
    remedy: str
    sure: bool = False


def _join(mistakes: Sequence[_Mistake]) -> str:
    """One line for all that could be done at one place."""
    chosen = [mistake for mistake in mistakes if mistake.sure] or mistakes
    remedies = dict.fromkeys(mistake.remedy for mistake in chosen)
    return f"{chosen[0].what}{', or '.join(remedies)}"


@dataclass(frozen=True)
class _Place:
    """Where something is wrong: its key as written, and the models that could be there and above.

    pydantic puts names of its own into a location, such as the kind of a boundary.
    """

    name: str
    here: Sequence[type[BaseModel]]
    above: Sequence[type[BaseModel]]
    many: bool = False

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]


def _find(detail: ErrorDetails, root: type[BaseModel], path: Sequence[str]) -> _Place:
    here: Sequence[type[BaseModel]] = [root]
    above, kept, many, keys_are_free = here, list(path), False, False
    for part in detail["loc"]:
        fields = here[0].model_fields if len(here) == 1 else {}
        if isinstance(part, int):
            kept.append(str(part))
            many = False
        elif part in fields:
            annotation = fields[part].annotation
            above, here = here, _models(annotation)
            many, keys_are_free = get_origin(annotation) is tuple, get_origin(annotation) is dict
            kept.append(part)
        elif len(here) > 1:
            here = [model for model in here if _tag(model) == part] or here
        elif keys_are_free and part != "[key]":
            kept.append(part)
    if detail["type"] == "extra_forbidden":
        above = here
        kept += [str(detail["loc"][-1])]
    return _Place(".".join(kept), here, above, many)


def _explain(detail: ErrorDetails, place: _Place) -> _Mistake:
    kind, name = detail["type"], place.name
    if kind == "extra_forbidden":
        return _Mistake(name, f"{name}: unknown key; ", _known(place))
    if kind == "missing" and not place.key.isdigit():
        return _Mistake(name, f"{name}: not given; ", _missing(place))
    if kind == "union_tag_not_found":
        kinds = ", ".join(sorted(map(_tag, place.here)))
        return _Mistake(name, f"{name}.kind: not given; ", f"use one of {kinds}")
    if kind == "value_error":
        message = remedy(detail)
        return _Mistake(name, _path_of(message, place), message, sure=True)
    value = detail["ctx"]["tag"] if kind == "union_tag_invalid" else detail["input"]
    key = f"{name}.kind" if kind == "union_tag_invalid" else name
    return _Mistake(name, f"{key} = {value!r}: ", _remedy(detail, place) + _nearest(value, detail))


def _path_of(message: str, place: _Place) -> str:
    """What goes before a validator's message, which may begin with "key = value"."""
    key = re.match(r"(\w+) = ", message)
    if key is None or not place.name:
        return f"{place.name}: " if place.name else ""
    return place.name.removesuffix(key[1]) if place.key == key[1] else f"{place.name}."


def _missing(place: _Place) -> str:
    if place.many:
        return f"write at least one table [[{place.name}]]"
    return "it has no default"


def _remedy(detail: ErrorDetails, place: _Place) -> str:
    kind = detail["type"]
    if place.many and place.here and kind in ("tuple_type", "model_type", "too_short"):
        return f"write it as tables [[{place.name}]]"
    return remedy(detail)


def remedy(detail: ErrorDetails) -> str:
    """What to do about a value, whatever it is a value of."""
    kind = detail["type"]
    words = _WORDS.get(kind) or _KINDS.get(kind.split("_")[0])
    if words is None:
        return detail["msg"].removeprefix("Value error, ")
    ctx = detail.get("ctx", {})
    whole = {k: int(v) for k, v in ctx.items() if isinstance(v, float) and v.is_integer()}
    return words.format(**ctx | whole)


def _known(place: _Place) -> str:
    known = sorted({key for model in place.above for key in model.model_fields})
    near = difflib.get_close_matches(place.key, known, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(known)}"


def _nearest(value: Any, detail: ErrorDetails) -> str:
    """A hint for a word that is none of the allowed ones."""
    ctx = detail.get("ctx", {})
    allowed = re.findall(r"'([^']+)'", f"{ctx.get('expected', '')}{ctx.get('expected_tags', '')}")
    by_lower = {word.lower(): word for word in allowed}
    near = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.7)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def _models(annotation: Any) -> list[type[BaseModel]]:
    """All model classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _tag(model: type[BaseModel]) -> str:
    """What tells the models of a union apart."""
    if "kind" in model.model_fields:
        return str(model.model_fields["kind"].default)
    return next((tag for tag, tagged in MODEL_TAGS.items() if tagged is model), model.__name__)
