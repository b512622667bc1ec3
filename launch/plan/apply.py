"""Writes planned cuts and boundaries into a run file, whose comments and order stay as they are.

The text is edited: the value of `pipeline.cuts` is replaced, `[[boundary]]` tables are replaced by
new ones at the end. No comment is lost: those of the old tables come first there and are said to be
theirs, and one on a line that goes gets a line of its own. The result must read back as what was
meant, or nothing is written.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from thinpipe.launch.config.toml import ConfigError, toml_value

_HEADER = re.compile(r"^\s*\[")
_OLD = "# comments of the boundaries that were here before:"
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
    lines, comments = text.splitlines(), list[str]()
    if boundaries is not None:
        lines, comments = _without_boundaries(lines)
    kept = _with_cuts(lines, f"cuts = {list(cuts)}", has_cuts=_has_cuts(text))
    while kept and not kept[-1].strip():
        kept.pop()
    body = "\n".join(kept) + "\n"
    if boundaries is None:
        return body
    old = [comment for comment in comments if comment.strip() != _OLD]
    return "\n".join([body, *([_OLD, *old] if old else []), boundary_text(boundaries)])


def _without_boundaries(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """The other lines, and the comments of boundary tables; those right above a table are its."""
    kept, comments, last = list[str](), list[str](), list[str]()
    inside = False
    for line in lines:
        if line.lstrip().startswith("#"):
            last.append(line)
            continue
        if _HEADER.match(line):
            inside = line.strip().startswith(("[[boundary]]", "[boundary."))
        if inside:
            comments += [*last, *_own_line(_parts(line)[1])]
        else:
            kept += [*last, line]
        last = []
    (comments if inside else kept).extend(last)
    return kept, comments


def _with_cuts(lines: Sequence[str], new_cuts: str, *, has_cuts: bool) -> list[str]:
    kept: list[str] = []
    section, placed, brackets = "", False, 0
    for line in lines:
        code, comment = _parts(line)
        if brackets > 0:  # the rest of a list that is replaced
            brackets += _open_brackets(code)
            kept += _own_line(comment)
            continue
        if _HEADER.match(line):
            section = code.strip()
        at_cuts = _CUTS.match(line)
        prefix = "pipeline." if section == "" else ""
        if not at_cuts or not _is_pipeline(section, line):
            kept.append(line)
            if section == "[pipeline]" and _HEADER.match(line) and not has_cuts:
                kept.append(new_cuts)
                placed = True
            continue
        brackets = _open_brackets(code)
        kept += _own_line(comment) if placed else [prefix + new_cuts + comment]
        placed = True
    return kept if placed else [*kept, "", "[pipeline]", new_cuts]


def _is_pipeline(section: str, line: str) -> bool:
    return section == "[pipeline]" or (not section and line.lstrip().startswith("pipeline."))


def _has_cuts(text: str) -> bool:
    pipeline = tomllib.loads(text).get("pipeline", {})
    return bool(pipeline.keys() & {"cuts", "stages"})


def _parts(line: str) -> tuple[str, str]:
    """Code, and the comment with the space before it: no value that is replaced can hold a #."""
    code = line.split("#")[0].rstrip() if "#" in line else line
    return code, line[len(code) :]


def _own_line(comment: str) -> list[str]:
    return [comment.strip()] if comment else []


def _open_brackets(code: str) -> int:
    return code.count("[") - code.count("]")


def boundary_text(boundaries: Sequence[Mapping[str, Any]]) -> str:
    """`[[boundary]]` tables as a run file has them."""
    lines = []
    for boundary in boundaries:
        lines.append("[[boundary]]")
        for key, value in boundary.items():
            lines.append(f"{key} = {toml_value(value)}")
        lines.append("")
    return "\n".join(lines)
