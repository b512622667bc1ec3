"""Writes planned cuts and boundaries into a run file, whose comments and order stay as they are.

The text is edited: the value of `pipeline.cuts` is replaced, `[[boundary]]` tables are replaced by
new ones at the end. The result must read back as what was meant, or nothing is written.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from launch.config_file import ConfigError

_HEADER = re.compile(r"^\s*\[")
_CUTS = re.compile(r"^\s*(?:pipeline\.)?(?:cuts|stages)\s*=")


def apply_plan(
    path: Path, cuts: Sequence[int], boundaries: Sequence[Mapping[str, Any]] | None
) -> None:
    """Put the cuts, and the boundary tables if there are any, into the run file.

    Raises:
        ConfigError: the file is written in a way that cannot be edited; says what to do by hand.
    """
    text = path.read_text()
    wanted = tomllib.loads(text)
    pipeline = {k: v for k, v in wanted.get("pipeline", {}).items() if k != "stages"}
    wanted["pipeline"] = pipeline | {"cuts": list(cuts)}
    if boundaries is not None:
        wanted["boundary"] = [dict(boundary) for boundary in boundaries]
    edited = _edit(text, cuts, boundaries)
    try:
        found = tomllib.loads(edited)
    except tomllib.TOMLDecodeError:
        found = {}
    if found != wanted:
        raise ConfigError(
            f"{path}: written in a way that --apply cannot edit; put this into it yourself:\n"
            + tomli_w.dumps({key: wanted[key] for key in ("pipeline", "boundary") if key in wanted})
        )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(edited)
    os.replace(partial, path)


def _edit(text: str, cuts: Sequence[int], boundaries: Sequence[Mapping[str, Any]] | None) -> str:
    kept: list[str] = []
    section, placed, brackets = "", False, 0
    new_cuts = f"cuts = {list(cuts)}"
    for line in text.splitlines():
        if brackets > 0:  # the rest of a list that is replaced
            brackets += _open_brackets(line)
            continue
        if _HEADER.match(line):
            section = line.split("#")[0].strip()
        if boundaries is not None and section.startswith(("[[boundary]]", "[boundary.")):
            continue
        at_cuts = _CUTS.match(line)
        prefix = "pipeline." if section == "" else ""
        if not at_cuts or not _is_pipeline(section, line):
            kept.append(line)
            if section == "[pipeline]" and _HEADER.match(line) and not _has_cuts(text):
                kept.append(new_cuts)
            continue
        brackets = _open_brackets(line)
        if not placed:
            comment = re.search(r"\s+#[^\"']*$", line)
            kept.append(prefix + new_cuts + (comment[0] if comment and not brackets else ""))
            placed = True
    if not placed and "[pipeline]" not in text:
        kept += ["", "[pipeline]", new_cuts]
    while kept and not kept[-1].strip():
        kept.pop()
    body = "\n".join(kept) + "\n"
    return body if boundaries is None else f"{body}\n{_tables(boundaries)}"


def _is_pipeline(section: str, line: str) -> bool:
    return section == "[pipeline]" or (not section and line.lstrip().startswith("pipeline."))


def _has_cuts(text: str) -> bool:
    pipeline = tomllib.loads(text).get("pipeline", {})
    return bool(pipeline.keys() & {"cuts", "stages"})


def _open_brackets(line: str) -> int:
    code = line.split("#")[0]
    return code.count("[") - code.count("]")


def _tables(boundaries: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for boundary in boundaries:
        lines.append("[[boundary]]")
        for key, value in boundary.items():
            lines.append(f"{key} = {_inline(value)}")
        lines.append("")
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
