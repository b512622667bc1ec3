"""The generated reference knows every setting there is."""

import importlib.util
from pathlib import Path

import pytest
from pydantic import BaseModel

from launch.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    folder: Path = tmp_path_factory.mktemp("generated")
    reference.write(folder, pages=DOCS, listed={"index"})
    return folder


def test_every_setting_is_listed(pages: Path) -> None:
    text = (pages / "settings.md").read_text()
    for name, field in RunConfig.model_fields.items():
        assert f"[{name}]" in text
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for key, inner in field.annotation.model_fields.items():
                assert inner.exclude or f"| `{key}` |" in text, f"{name}.{key}"
    assert 'kind = "aqsgd"' in text
    assert "| `bits` | int | `4` | at least `1`, at most `8` |" in text
    assert "[gradcomp.allreduce]" in text


def test_pages_that_are_not_of_the_guide_are_algorithms(pages: Path) -> None:
    text = (pages / "algorithms.md").read_text()
    assert "/pipeline\n" in text
    assert "/index\n" not in text
