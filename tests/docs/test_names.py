"""Files and code that pages name exist."""

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aqsgd", "gradcomp", "launch", "pipeline")
FOLDERS = (*PACKAGES, "benchmarks", "docs", "examples", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in PACKAGES
    for path in (ROOT / folder).rglob("*.py")
)


def quoted(page: Path) -> Iterator[str]:
    """What stands between backticks, outside of blocks."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    yield from re.findall(r"`([^`\n]+)`", text)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in quoted(page):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./<>*-]*", name):
            pattern = re.sub("<.*?>", "*", name).rstrip("/")
            assert any(ROOT.glob(pattern)), name
        elif re.fullmatch(r"[\w/]+\.py", name):
            assert name in FILES, f"{name}: write its path from the top of the repository"
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_that_a_page_names_exists(page: Path) -> None:
    for name in quoted(page):
        if found := re.fullmatch(r"([A-Z][a-z]\w*)\.(\w+)", name):
            owner, member = found.groups()
            assert re.search(rf"\b{owner}\b", CODE), name
            assert re.search(rf"\b{member}\b", CODE), name
        elif re.fullmatch(r"thinpipe(\.\w+)+", name):
            pkgutil.resolve_name(name)
