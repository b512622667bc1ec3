"""Reports pydantic's validation errors in terms of the file: key, value, remedy."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from thinpipe.launch.config.model import MODEL_TAGS

_REMEDIES = {
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
_TYPE_REMEDIES = {
    "int": "give a whole number",
    "float": "give a number",
    "bool": "use true or false",
}


def explain(error: ValidationError, root: type[BaseModel], *above: str) -> list[str]:
    """One line per wrong key of the table that `root` models; `above` is the path of that table."""
    found: dict[str, list[_Problem]] = {}
    for detail in error.errors():
        problem = _explain(detail, _find(detail, root, above))
        found.setdefault(problem.name, []).append(problem)
    return [
        _join(problems)
        for name, problems in found.items()
        if not any(other.startswith(f"{name}.") for other in found)  # the most specific of a union
    ]


def first_misread(given: Any, found: Any, *above: str) -> str | None:
    """The first `true`, `false` or quoted number that was taken for a number, as "a.b = true".

    `given` is what was read, `found` what was made of it: pydantic takes true for 1 and "8" for 8.
    """
    if isinstance(given, bool | str):
        number = isinstance(found, int | float) and not isinstance(found, bool)
        misread = number and (isinstance(given, bool) or _reads_as_number(given))
        return f"{'.'.join(above)} = {json.dumps(given)}" if misread else None
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(given, Mapping):
        of = found.get if isinstance(found, Mapping) else partial(getattr, found)
        pairs = ((key, value, of(key, None)) for key, value in given.items())
    elif isinstance(given, list) and isinstance(found, list | tuple):
        pairs = ((index, *pair) for index, pair in enumerate(zip(given, found, strict=False)))
    inside = (first_misread(value, its, *above, str(key)) for key, value, its in pairs)
    return next(filter(None, inside), None)


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Problem(NamedTuple):
    """An error at a key, with its value if that helps, and the remedy.

    `sure`: it applies whichever member of a union was meant.
    """

    name: str
    what: str
    remedy: str
    sure: bool = False


def _join(problems: Sequence[_Problem]) -> str:
    """One line with all remedies for one key."""
    chosen = [problem for problem in problems if problem.sure] or problems
    remedies = dict.fromkeys(problem.remedy for problem in chosen)
    return f"{chosen[0].what}{', or '.join(remedies)}"


@dataclass(frozen=True)
class _Place:
    """A wrong key as written, with the models allowed there and one level up.

    pydantic adds names of its own to a location, such as the kind of a boundary.
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


def _explain(detail: ErrorDetails, place: _Place) -> _Problem:
    kind, name = detail["type"], place.name
    if kind == "extra_forbidden":
        return _Problem(name, f"{name}: unknown key; ", _known(place))
    if kind == "missing" and not place.key.isdigit():
        return _Problem(name, f"{name}: not given; ", _missing(place))
    if kind == "union_tag_not_found":
        kinds = ", ".join(sorted(map(_tag, place.here)))
        return _Problem(name, f"{name}.kind: not given; ", f"use one of {kinds}")
    if kind == "value_error":
        message = remedy(detail)
        return _Problem(name, _path_of(message, place), message, sure=True)
    value = detail["ctx"]["tag"] if kind == "union_tag_invalid" else detail["input"]
    key = f"{name}.kind" if kind == "union_tag_invalid" else name
    return _Problem(name, f"{key} = {value!r}: ", _remedy(detail, place) + _nearest(value, detail))


def _path_of(message: str, place: _Place) -> str:
    """Prefix for a validator's message, which may begin with "key = value"."""
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
    """The remedy for a wrong value of any setting."""
    kind = detail["type"]
    text = _REMEDIES.get(kind) or _TYPE_REMEDIES.get(kind.split("_")[0])
    if text is None:
        return detail["msg"].removeprefix("Value error, ")
    ctx = detail.get("ctx", {})
    whole = {k: int(v) for k, v in ctx.items() if isinstance(v, float) and v.is_integer()}
    return text.format(**ctx | whole)


def _known(place: _Place) -> str:
    sections = {
        name: [key for model in _models(field.annotation) for key in model.model_fields]
        for above in place.above
        for name, field in above.model_fields.items()
    }
    belongs = [f"[{name}]" for name, keys in sections.items() if place.key in keys]
    if belongs and place.name == place.key:
        return f"it belongs under {' or '.join(belongs)}"
    known = sorted({key for model in place.above for key in model.model_fields})
    near = difflib.get_close_matches(place.key, known, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(known)}"


def _nearest(value: Any, detail: ErrorDetails) -> str:
    """The nearest allowed value, as a hint."""
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
    """The discriminator of a model in a union."""
    if "kind" in model.model_fields:
        return str(model.model_fields["kind"].default)
    return next((tag for tag, tagged in MODEL_TAGS.items() if tagged is model), model.__name__)
