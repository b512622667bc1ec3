"""Pages are short to read: sentences of 25 words, lines of 100 characters."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *RESULTS.glob("*.md")]


def paragraphs(page: Path) -> Iterator[str]:
    """Prose without markup: paragraphs, list items, and cells of tables; code counts as a word."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```|^    [^\n]*", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\$[^$]+\$", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(?:[-*#]+|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\|.*", lambda row: "\n\n" + row[0].replace("|", "\n\n"), text, flags=re.M)
    yield from re.split(r"\n\s*\n", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_and_lines_are_short(page: Path) -> None:
    for paragraph in paragraphs(page):
        for sentence in re.split(r"(?<=[.!?:])[)\"*]*\s+(?=[A-Z*\"(])", paragraph):
            assert len(sentence.split()) <= 25, sentence
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    for line in text.splitlines():
        assert len(line) <= 100 or line.startswith(("|", "![")), line
