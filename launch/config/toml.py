"""Run files: TOML that may extend another, and dotted overrides.

Independent of what the settings are: the model to fill is an argument.
"""

import codecs
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tomlkit
from pydantic import BaseModel, ValidationError

from thinpipe.launch.config.errors import explain, first_misread

_MOST_NBYTES = 16 << 20  # largest run file; a larger file is something else
_SHOWN = 60  # characters shown of a line that cannot be read
_TOML_REMEDIES = (
    ("^Invalid", r"^\{", "that is JSON; write [section] and key = value"),
    ("^Invalid", "^//", "comments begin with #"),
    ("Invalid value", "= *(true|yes|on)$", "write true"),
    ("Invalid value", "= *(false|no|off)$", "write false"),
    ("Invalid value", "= *(none|null|nil|)$", "give a value, or leave the key out"),
    ("Invalid value", r"= *[+-]?\.\d", "write a digit before the point, as in 0.1"),
    ("Invalid value", r"= *\(", "write a list in brackets, as in [1, 2]"),
    ("Invalid value", r"= *[\u2018-\u201e\u00ab`]", 'use straight quotes, as in "a"'),
    ("Invalid value", "", "put text in quotes, and comments behind #"),
    ("Expected '='", "", "write key = value"),
    ("Expected newline", "", "one setting per line; write numbers as in 1000, 0.1 or 1e-3"),
    ("Cannot overwrite|Cannot declare|Duplicate", "", "it is there twice; remove one of them"),
    ("table declaration", "", "close the bracket, as in [run]"),
    ("for a key part", r",\s*}", "remove the comma before }"),
    ("Invalid initial character|Expected ']'", "", "close the bracket"),
    ("Illegal character '.n'|Unterminated|Expected [\"']", "", "close the quotes"),
    ("Unclosed array", "", "put commas between the values of the list, and ] at its end"),
    ("inline table", "", "put commas between the settings of the table, and } at its end"),
    ("Unescaped|escape|hex value", "", "put a path with backslashes in single quotes"),
)
"""Messages of Python's parser, lines they are about, and remedies; the first that fits is used."""
_Model = TypeVar("_Model", bound=BaseModel)


class ConfigError(ValueError):
    """An invalid run file or override."""


def load_as(
    model: type[_Model],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
    context: Mapping[str, Any] | None = None,
) -> _Model:
    """`load_config` for a file of another kind; `context` is for the model's validators.

    `aliases` are other dotted names of settings. Each file and override is read with them first, so
    that later settings override earlier ones under either name.
    """
    tree = read_tree(path, overrides, aliases)
    try:
        found = model.model_validate(tree, context=context)
    except ValidationError as error:
        lines = explain(error, model)
        told = (f"{_culprit(line, path, overrides)}: {line}" for line in lines)
        raise ConfigError("\n".join(told)) from None
    if misread := first_misread(tree, found):
        raise ConfigError(f"{_culprit(misread, path, overrides)}: {misread}: give a number")
    return found


def _culprit(problem: str, path: Path, overrides: Sequence[str]) -> str:
    """Whether a problem, which begins with its key, is with an override or with the file.

    That is an override of the key, or else the last one that the problem mentions.
    """
    key = re.split(r"[^\w.]", problem, maxsplit=1)[0]
    named = {override.partition("=")[0].strip(): override for override in overrides}
    words = set(re.findall(r"\w[\w.]*\w", problem))
    inner = [name for name in named if f"{name}.".startswith(f"{key}.")]
    outer = [name for name in named if key.startswith(f"{name}.")]
    section = key.partition(".")[0]
    told = [
        name
        for name in named
        if name.startswith(f"{section}.") and f"{name.rpartition('.')[2]} = " in problem
    ]
    of_key = [*told, *outer, *inner]
    blamed = [name for name in named if name in words] + of_key
    return f"--set {named[blamed[-1]]}" if blamed else str(path)


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
        return set(tomllib.loads(read_text(path)))
    except (OSError, ValueError):
        return set()


def read_tree(
    path: Path, overrides: Sequence[str], aliases: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Settings of a run file and what it extends, with overrides, before any is checked.

    Raises:
        ConfigError: one cannot be read.
    """
    tree = _read(path, (), aliases)
    for override in overrides:
        _override(tree, override, aliases)
    return tree


def files_of(path: Path) -> list[Path]:
    """A run file and those that it extends.

    Raises:
        ConfigError: one cannot be read.
    """
    found: list[Path] = []
    _read(path, (), {}, found)
    return found


def read_text(path: Path) -> str:
    """The text of a run file or hosts file, UTF-8 with or without a byte order mark.

    Raises:
        ConfigError: it is something else, or cannot be read.
        FileNotFoundError: there is none.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: a folder; name the run file, or a run folder's config.toml")
        if path.exists() and not path.is_file():  # whose end may never come
            raise ConfigError(f"{path}: a device or a pipe; name a file")
        if path.exists() and path.stat().st_size > _MOST_NBYTES:
            raise ConfigError(
                f"{path}: has {path.stat().st_size / 1e6:.0f} MB, more than any run file; name the "
                "run file, and this one in data.path if it is the text"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(
                f"{path}: a link to {path.readlink()}, which does not exist; correct the link"
            ) from None
        raise
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); correct its owner or mode (ls -l)"
        ) from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            f"{path}: UTF-16, as some editors and PowerShell's > write; save it as UTF-8 "
            f"(iconv -f UTF-16 -t UTF-8)"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: not UTF-8 text (line {line}); name a run file, or save it as UTF-8"
        ) from None


def _read(
    path: Path, seen: tuple[Path, ...], aliases: Mapping[str, str], found: list[Path] | None = None
) -> dict[str, Any]:
    """A file merged with those that it extends; the files are added to `found`."""
    place = Path(os.path.realpath(path))  # which does not mind a link that leads to itself
    if place in seen:
        raise ConfigError(
            f"{path}: extends itself, via {seen[-1]}; remove or correct extends in one of them"
        )
    if path.suffix == ".py":
        raise ConfigError(f"{path}: a program; use `thinpipe run {path}`")
    try:
        text = read_text(path)
    except FileNotFoundError:
        remedy = f"correct extends in {seen[-1]}" if seen else "correct the path"
        raise ConfigError(f"{path}: no such file, seen from {Path.cwd()}; {remedy}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}: cannot be read as TOML: {error}{_toml_remedy(text, str(error))}"
        ) from None
    if found is not None:
        found.append(path)
    _rename(tree, aliases, path)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{path}: extends = {base!r}: give the name of a file, in quotes")
    return _merged(_read(path.parent / base, (*seen, place), aliases, found), tree)


def _toml_remedy(text: str, problem: str) -> str:
    place = re.search(r"line (\d+)", problem)
    lines = text.splitlines()
    line = (lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else "").strip()
    remedy = next(
        (
            say
            for what, where, say in _TOML_REMEDIES
            if re.search(what, problem) and re.search(where, line, re.IGNORECASE)
        ),
        "correct that line",
    )
    shown = f": {line[:_SHOWN]}" if line else ""
    return f"{shown}; {remedy}"


def _rename(tree: dict[str, Any], aliases: Mapping[str, str], path: Path) -> None:
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
