"""Writes planned cuts and boundaries into a run file, whose comments and order stay as they are.

No comment is lost: those of a value that is replaced follow the new one on its line, those of
replaced `[[boundary]]` tables come first in the new ones, under a heading.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from thinpipe.launch.config.toml import ConfigError, read_text, toml_value

_OLD = "# comments of the previous boundaries:"
_COMMENT = re.compile(r"#.*")  # in the values that are replaced: none of them can contain a #


def apply_plan(
    path: Path,
    cuts: Sequence[int],
    boundaries: Sequence[Mapping[str, Any]] | None,
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Put the cuts, settings of other sections or of the pipeline, and the boundary tables if there
    are any, into the run file.

    Raises:
        ConfigError: the edited file would not read back as intended; nothing is written.
    """
    text = read_text(path)
    expected = tomllib.loads(text)
    pipeline = {k: v for k, v in expected.get("pipeline", {}).items() if k != "stages"}
    expected["pipeline"] = pipeline | {"cuts": list(cuts)}
    for name, settings in sections.items():
        expected[name] = {**expected.get(name, {}), **settings}
    if boundaries is not None:
        expected["boundary"] = [dict(boundary) for boundary in boundaries]
    try:
        edited = _edit(text, cuts, boundaries, sections)
        is_right = tomllib.loads(edited) == expected
    except (TOMLKitError, tomllib.TOMLDecodeError):
        is_right = False
    if not is_right:
        keys = ("pipeline", "boundary", *sections)
        tables: dict[str, Any] = {key: expected[key] for key in keys if key in expected}
        raise ConfigError(
            f"{path}: --apply cannot edit this file; put this into it by hand:\n"
            + tomlkit.dumps(tables)
        )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(edited, encoding="utf-8")
    os.replace(partial, path)


def _edit(
    text: str,
    cuts: Sequence[int],
    boundaries: Sequence[Mapping[str, Any]] | None,
    sections: Mapping[str, Mapping[str, Any]],
) -> str:
    document = tomlkit.parse(text)
    pipeline: Any = document.setdefault("pipeline", tomlkit.table())
    replaced = [item for key, item in pipeline.items() if key in ("cuts", "stages")]
    lines = "\n".join(item.as_string() + item.trivia.comment for item in replaced)
    comments = _COMMENT.findall(lines)
    pipeline.pop("stages", None)
    pipeline["cuts"] = list(cuts)
    for name, settings in sections.items():
        section: Any = document.setdefault(name, tomlkit.table())
        section.update(settings)
    if comments:
        pipeline["cuts"].comment("  ".join(comments).removeprefix("# "))
    if boundaries is not None:
        old = tomlkit.dumps({"boundary": document.get("boundary", [])})
        document["boundary"] = _boundaries(old, boundaries)
    return document.as_string().rstrip("\n") + "\n"


def _boundaries(old: str, boundaries: Sequence[Mapping[str, Any]]) -> Any:
    """The new tables, with the comments of the old ones.

    Comments after the last value of the old ones belong to the table that follows them in the file.
    """
    lines = old.splitlines()
    after = list(takewhile(lambda line: line.strip()[:1] in ("", "#"), reversed(lines)))[::-1]
    comments = _COMMENT.findall("\n".join(lines[: len(lines) - len(after)]))
    heading = [_OLD, *comments] if comments and _OLD not in comments else comments
    head, _, rest = boundary_text(boundaries).partition("\n")
    tables = [head, *heading, rest.rstrip("\n"), *(after or [""])]
    return tomlkit.parse("\n".join(tables) + "\n")["boundary"]


def boundary_text(boundaries: Sequence[Mapping[str, Any]]) -> str:
    """`[[boundary]]` tables as a run file has them."""
    lines = []
    for boundary in boundaries:
        fields = (f"{key} = {toml_value(value)}" for key, value in boundary.items())
        lines += ["[[boundary]]", *fields, ""]
    return "\n".join(lines)
