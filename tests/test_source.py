"""What every source file does, whoever reads it: `open` says UTF-8, validators do not assert."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "aqsgd", "gradcomp", "launch")


def trees(folders: Iterable[str], *words: str) -> Iterator[tuple[Path, ast.Module]]:
    """Files that have one of the words: most do not, and parsing takes seconds."""
    for file in [ROOT / "setup.py", *(f for name in folders for f in (ROOT / name).rglob("*.py"))]:
        source = file.read_text(encoding="utf-8")
        if any(word in source for word in words):
            yield file.relative_to(ROOT), ast.parse(source)


def without_encoding(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that read or write text as the locale has it."""
    for node in ast.walk(tree):
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


CALLS = """
open("x")
open("x", "a")
p.open("w")
p.open()
p.open(mode="r+")
p.read_text()
"""


def test_every_text_file_is_opened_as_utf8() -> None:
    assert [*without_encoding(ast.parse(CALLS))] == [2, 3, 4, 5, 6, 7]
    folders = (*PACKAGES, "benchmarks", "docs", "examples")
    found = [
        f"{file}:{line}"
        for file, tree in trees(folders, "open(", "_text(")
        for line in without_encoding(tree)
    ]
    assert not found, 'say encoding="utf-8"'


def test_no_validator_asserts() -> None:
    """`python -O` leaves those out, and what a user gives is checked all the same."""
    found = [
        f"{file}:{inner.lineno}"
        for file, tree in trees(PACKAGES, "validator")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if "validator" in "".join(map(ast.unparse, node.decorator_list))
        for inner in ast.walk(node)
        if isinstance(inner, ast.Assert)
    ]
    assert not found, "raise a ValueError"
