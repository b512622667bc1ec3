"""A package imports only what stands to its left, without cycles, and cheaply."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "pipeline.wire": {"pipeline.wire"},
    "pipeline": {"pipeline.wire", "pipeline"},
    "aqsgd": {"pipeline.wire", "pipeline", "aqsgd"},
    "gradcomp": {"pipeline.wire", "gradcomp"},
    "launch": {"pipeline.wire", "pipeline", "aqsgd", "gradcomp", "launch"},
}


def package_of(module: str) -> str | None:
    if module == "pipeline.wire" or module.startswith("pipeline.wire."):
        return "pipeline.wire"
    top = module.split(".")[0]
    return top if top in ALLOWED else None


def modules() -> dict[str, Path]:
    found = {}
    for top in ("pipeline", "aqsgd", "gradcomp", "launch"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], *, at_import: bool) -> set[str]:
    """Our modules that a file imports; `at_import` leaves out imports inside functions."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.iter_child_nodes(tree)) if at_import else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return {name for name in found if name in known}


def test_packages_import_only_what_stands_to_their_left() -> None:
    known = modules()
    for module, path in known.items():
        package = package_of(module)
        assert package is not None
        for name in imports(path, known, at_import=False):
            assert package_of(name) in ALLOWED[package], f"{module} imports {name}"


def test_there_are_no_import_cycles() -> None:
    known = modules()
    graph = {name: imports(path, known, at_import=True) for name, path in known.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


CHEAP = [
    *("pipeline", "pipeline.wire", "aqsgd", "gradcomp", "launch"),
    *("pipeline.wire.uniform", "pipeline.boundary", "pipeline.channel", "aqsgd.delta"),
    "pipeline.wire.subset",
    "pipeline.wire.sparse",
]


@pytest.mark.parametrize("package", CHEAP)
def test_importing_is_cheap(package: str) -> None:
    heavy = "{'triton', 'numba', 'torch.distributed.pipelining'} & set(sys.modules)"
    code = f"import sys, {package}; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_package_files_hold_only_a_docstring() -> None:
    for path in ROOT.glob("*/**/__init__.py"):
        top = path.relative_to(ROOT).parts[0]
        if top in ("pipeline", "aqsgd", "gradcomp", "launch") and path.parent.name != "kernels":
            (docstring,) = ast.parse(path.read_text()).body
            assert isinstance(docstring, ast.Expr), path


def test_every_package_is_in_the_distribution() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    for path in modules().values():
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert f'"{package}"' in listed, package
