"""Run files: TOML that may extend another, dotted overrides, and mistakes put into words.

Nothing here knows what the settings are: the model to fill is an argument.
"""

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launch.model_section import MODEL_TAGS

_Model = TypeVar("_Model", bound=BaseModel)


class ConfigError(ValueError):
    """A run file or an override says something that cannot be done."""


def load_as(model: type[_Model], path: Path, overrides: Sequence[str] = ()) -> _Model:
    """`load_config` for a file of another kind."""
    tree = _read(path, ())
    for override in overrides:
        _override(tree, override)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail, model) for detail in error.errors()]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself, by way of {seen[-1]}")
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        by = f" ({seen[-1]} extends it)" if seen else ""
        raise ConfigError(f"{path}: no such file{by}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    base = tree.pop("extends", None)
    if base is None:
        return tree
    return _merged(_read(path.parent / str(base), (*seen, path.resolve())), tree)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if value == "" and key in merged:
            del merged[key]
            continue
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_tables else value
    return merged


def _override(tree: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write it as section.key=value, as in train.lr=1e-3")
    place: Any = tree
    try:
        for key in keys[:-1]:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        last = int(keys[-1]) if isinstance(place, list) else keys[-1]
        if value.strip():
            place[last] = _parse(value.strip())
        else:
            place.pop(last, None)
    except (IndexError, ValueError, TypeError, AttributeError):
        raise ConfigError(f"--set {text}: there is no {name.strip()} to set") from None


def _parse(text: str) -> Any:
    """A TOML value, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(detail: ErrorDetails, root: type[BaseModel]) -> str:
    tags = ("aqsgd", "auto", "direct", "raw", "stateless", *MODEL_TAGS)
    place = [part for part in detail["loc"] if part not in tags]
    name = ".".join(str(part) for part in place)
    if detail["type"] == "extra_forbidden":
        known = _keys_at(detail["loc"][:-1], root)
        near = difflib.get_close_matches(str(place[-1]), known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(sorted(known))}"
        return f"{name}: unknown key; {hint}"
    if detail["type"] == "missing":
        return f"{name}: not given; it has no default"
    message = detail["msg"].removeprefix("Value error, ") + _nearest(detail)
    if detail["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name} = {detail['input']!r}: {message}"


def _nearest(detail: ErrorDetails) -> str:
    """A hint for a word that is none of the allowed ones."""
    allowed = re.findall(r"'([^']+)'", str(detail.get("ctx", {}).get("expected", "")))
    by_lower = {word.lower(): word for word in allowed}
    near = difflib.get_close_matches(str(detail["input"]).lower(), by_lower, n=1)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def _keys_at(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """Keys of the table at an error's location; tagged unions put the tag into it."""
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        fields = getattr(model, "model_fields", {})
        if isinstance(part, str) and part in fields:
            model = _models(fields[part].annotation)
        elif part in MODEL_TAGS:
            model = MODEL_TAGS[str(part)]
        elif isinstance(model, list):
            model = next(m for m in model if m.model_fields["kind"].default == part)
    return list(getattr(model, "model_fields", {}))


def _models(annotation: Any) -> Any:
    """The model class in an annotation, or the list of them in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [model for part in get_args(annotation) for model in _as_list(_models(part))]
    return found[0] if len(found) == 1 else found


def _as_list(models: Any) -> list[Any]:
    return models if isinstance(models, list) else [models]
