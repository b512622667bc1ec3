"""The data inside of a page, for tests of what it shows."""

import json
import re
from pathlib import Path
from typing import Any


def messages_of(page: Path) -> list[dict[str, Any]]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    messages: list[dict[str, Any]] = json.loads(found[1])
    return messages


def parts_of(page: Path) -> dict[str, Any]:
    """Of its only run."""
    (message,) = messages_of(page)
    parts: dict[str, Any] = message["parts"]
    return parts


def table_of(parts: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = (table for table in parts["tables"] if table["title"] == title)
    return dict(found)
