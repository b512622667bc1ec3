"""The wheel: one importable name, and it trains where only it is installed."""

import shutil
import subprocess
import sys
import zipfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

import thinpipe
from tests.programs import ran

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("build", "runs", "benchmarks", "docs", "tests", "*.egg-info", "__pycache__", ".*")
DIST_INFO = f"thinpipe-{thinpipe.__version__}.dist-info"
RUN = """
[model]
layers = 2
width = 16
heads = 2
context = 16
[data]
path = "text.txt"
sequence_length = 16
train_sequences = 8
eval_sequences = 2
[pipeline]
cuts = [1]
microbatches = 2
device = "cpu"
[train]
epochs = 2
batch_size = 4
"""

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(600)]


def pip(*arguments: object) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", *map(str, arguments), *quiet], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves things in the folder that it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*LEFT_OUT))
    isolated = int(version("setuptools").split(".")[0]) < 77
    options = () if isolated else ("--no-build-isolation",)
    pip("wheel", folder / "source", "--no-deps", *options, "--wheel-dir", folder)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names} == {"thinpipe", DIST_INFO}
    assert "thinpipe/py.typed" in names
    sources = {
        f"thinpipe/{path.relative_to(ROOT)}"
        for top in ("pipeline", "aqsgd", "gradcomp", "launch")
        for path in (ROOT / top).rglob("*.py")
        if path.parent != ROOT / "launch" / "api"
    }
    assert sources <= names


def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    """In a folder with modules of the user's that are named like ours."""
    installed, folder = tmp_path / "site", tmp_path / "work"
    pip("install", "--no-deps", "--target", installed, wheel)
    assert {path.name for path in installed.iterdir()} == {"thinpipe", DIST_INFO, "bin"}
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    (folder / "text.txt").write_text("one and one is two\n" * 99)
    for name in ("thinpipe", "launch", "pipeline"):
        (folder / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    python = partial(ran, sys.executable, "-P", cwd=folder, PYTHONPATH=str(installed))
    found = python("-c", "import thinpipe; print(thinpipe.__file__)").stdout
    assert Path(found.strip()).is_relative_to(installed)
    done = python(installed / "bin" / "thinpipe", "train", "run.toml")
    assert (folder / "runs" / "run" / "report.html").is_file()
    assert "not ours" not in done.stdout + done.stderr
