"""Run files: TOML that may extend another, and dotted overrides.

Independent of what the settings are: the model to fill is an argument.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tomlkit
from pydantic import BaseModel, ValidationError

from thinpipe.launch.config.errors import explain

_Model = TypeVar("_Model", bound=BaseModel)


class ConfigError(ValueError):
    """An invalid run file or override."""


def load_as(
    model: type[_Model],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> _Model:
    """`load_config` for a file of another kind.

    `aliases` are other dotted names of settings. Each file and override is read with them first, so
    that later settings override earlier ones under either name.
    """
    tree = _read(path, (), aliases)
    for override in overrides:
        _override(tree, override, aliases)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = explain(error, model)
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None


def toml_value(value: Any) -> str:
    """A value as a run file has it, in one line."""
    if isinstance(value, Mapping):
        given = (f"{k} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(given)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    text: str = tomlkit.item(value).as_string()
    return text


def top_keys(path: Path) -> set[str]:
    """Top-level keys of a file, which show its kind; empty if it cannot be read."""
    try:
        return set(tomllib.loads(path.read_text()))
    except (OSError, ValueError):
        return set()


def _read(path: Path, seen: tuple[Path, ...], aliases: Mapping[str, str]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself, via {seen[-1]}")
    if path.is_dir():
        raise ConfigError(f"{path}: a folder; name the run file, or a run folder's config.toml")
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        remedy = f"correct extends in {seen[-1]}" if seen else "correct the path"
        raise ConfigError(f"{path}: no such file, seen from {Path.cwd()}; {remedy}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    _rename(tree, aliases, path)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    return _merged(_read(path.parent / str(base), (*seen, path.resolve()), aliases), tree)


def _rename(tree: dict[str, Any], aliases: Mapping[str, str], path: Path) -> None:
    """Replace aliases by the settings' names."""
    for alias, name in aliases.items():
        *sections, written = alias.split(".")
        table: Any = tree
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if not isinstance(table, dict) or written not in table:
            continue
        key = name.rpartition(".")[2]
        if key in table:
            raise ConfigError(f"{path}: {alias} and {name} are one setting; remove one of them")
        table[key] = table.pop(written)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if value == "" and key in merged:
            del merged[key]
            continue
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_tables else value
    return merged


def _override(tree: dict[str, Any], text: str, aliases: Mapping[str, str]) -> None:
    name, equals, value = text.partition("=")
    keys = aliases.get(name.strip(), name.strip()).split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write it as section.key=value, as in train.lr=1e-3")
    table: Any = tree
    try:
        for key in keys[:-1]:
            table = table[int(key)] if isinstance(table, list) else table.setdefault(key, {})
        last = int(keys[-1]) if isinstance(table, list) else keys[-1]
        if value.strip():
            table[last] = _parse(value.strip())
        else:
            table.pop(last, None)
    except (IndexError, ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"--set {text}: no setting {name.strip()}; tables of a list are numbered from 0, as in "
            "boundary.0.forward.bits"
        ) from None


def _parse(text: str) -> Any:
    """A TOML value, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
