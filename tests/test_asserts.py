"""What a user gives is not checked by `assert`: `python -O` leaves those out."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_validator_asserts() -> None:
    found = []
    for file in (
        f
        for top in ("pipeline", "aqsgd", "gradcomp", "launch")
        for f in ROOT.glob(f"{top}/**/*.py")
    ):
        source = file.read_text(encoding="utf-8")
        if "validator" not in source or "assert " not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and "validator" in "".join(
                map(ast.unparse, node.decorator_list)
            ):
                asserts = [inner for inner in ast.walk(node) if isinstance(inner, ast.Assert)]
                found += [f"{file.relative_to(ROOT)}:{inner.lineno}" for inner in asserts]
    assert not found, "raise a ValueError"
