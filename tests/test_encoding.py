"""Text files are UTF-8, whatever the user's locale: every `open` says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "aqsgd", "gradcomp", "launch", "benchmarks", "docs", "examples")


def without_encoding(source: str) -> Iterator[int]:
    """Lines of calls that read or write text as the locale has it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or "encoding" in {k.arg for k in node.keywords}:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "os":
            name = f".{node.func.attr}"
        modes = node.args[name == "open" :][:1]
        modes += [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
        mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else None
        text = isinstance(mode, str) and set(mode) <= set("rwaxt+")
        is_open = name in ("open", ".open") and (text or not modes)
        if is_open or name in (".read_text", ".write_text"):
            yield node.lineno


@pytest.mark.parametrize(
    "call",
    [
        'open("x")',
        'open("x", "a")',
        'p.open("w")',
        "p.open()",
        'p.open(mode="r+")',
        "p.read_text()",
    ],
)
def test_a_call_without_encoding_is_seen(call: str) -> None:
    assert list(without_encoding(call)) == [1]


def test_every_text_file_is_opened_as_utf8() -> None:
    found = []
    for file in [ROOT / "setup.py", *(f for name in FOLDERS for f in (ROOT / name).rglob("*.py"))]:
        source = file.read_text(encoding="utf-8")
        if "open(" in source or "_text(" in source:  # most do not; parsing takes seconds
            found += [f"{file.relative_to(ROOT)}:{line}" for line in without_encoding(source)]
    assert not found, 'say encoding="utf-8"'
