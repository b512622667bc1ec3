"""The package page: whatever the README shows is found from there."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PLACE = "https://example.org/a/thinpipe"


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_images_are_absolute_and_lead_to_files(setup: ModuleType) -> None:
    page = setup.package_page((ROOT / "README.md").read_text(encoding="utf-8"), PLACE, "9.9")
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert all(target.startswith("https://") for target in targets)
    own = [target for target in targets if target.startswith(PLACE)]
    assert len(own) > 20
    for target in own:
        path = re.sub(rf"{PLACE}/(raw|blob)/v9.9/", "", target).partition("#")[0]
        assert (ROOT / path).exists(), target
    images = re.findall(r"!\[[^\]]*\]\((\S+)\)", page)
    assert images
    assert all(image.startswith(f"{PLACE}/raw/v9.9/") for image in images)


def test_every_python_that_is_named_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert named[0] == project["requires-python"].removeprefix(">=")
    assert project["authors"]
    assert project["keywords"]
