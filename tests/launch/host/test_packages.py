"""Every command reports a missing package in one line, with the command that installs it."""

import importlib
import os
import py_compile
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.huggingface import saved_model
from tests.launch.test_train import run_file
from tests.ports import free_port
from tests.programs import ran
from thinpipe.launch.host.packages import EXTRAS, explain, install, is_compiled

__all__ = ["run_file"]

HF = install("thinpipe[hf]")
HIDE = """
import os, sys
for name in os.environ.get("HIDDEN", "").split():
    sys.modules[name] = None  # as if it were not installed
"""


def without(
    package: str, folder: Path, *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command where a package cannot be imported, nor in the processes that it starts."""
    (folder / "sitecustomize.py").write_text(HIDE)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"HIDDEN": package, "PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, "-P", "-m", "thinpipe.launch", *arguments]
    return ran(*words, code=None, cwd=cwd, **environment)


def command(name: str, run_file: Path, *overrides: str) -> list[str]:
    """A command that is about a run."""
    folder = run_file.parent / "run"
    if name == "shaped":
        return ["shaped", "--hosts", "2", "--", "true"]
    if name == "export":
        folder.mkdir()
        (folder / "config.toml").write_text(run_file.read_text(encoding="utf-8"))
        return ["export", str(folder), str(folder / "model")]
    settings = [word for override in overrides for word in ("--set", override)]
    return [name, str(run_file), *settings]


def test_remedies_are_for_the_environment_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my venv/bin/python")
    assert install("thinpipe[hf]") == "`'/my venv/bin/python' -m pip install 'thinpipe[hf]'`"


def test_what_is_not_compiled_yet_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "imported_once.py"
    module.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_compiled(module.stem)
    py_compile.compile(str(module))
    assert is_compiled(module.stem)
    assert is_compiled("no_such_module"), "which is said by whoever imports it"


@pytest.mark.parametrize("module", ["thinpipe.launch.gone", "pipeline", "launch.gone"])
def test_no_package_of_ours_is_to_be_installed_by_name(module: str) -> None:
    found = explain(ModuleNotFoundError(f"No module named {module!r}", name=module))
    again = install("thinpipe", "--force-reinstall")
    assert found == (
        f"the installation of ThinPipe is damaged (no module {module!r}); install it again, from "
        f"its source folder or with {again}"
    )


def test_a_module_of_the_user_in_place_of_a_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "datasets.py").write_text("")
    monkeypatch.setitem(sys.modules, "datasets", None)  # restored at the end
    del sys.modules["datasets"]
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("datasets.arrow")
    assert explain(raised.value) == (
        f"{tmp_path / 'datasets.py'} was imported in place of the package 'datasets'; rename it or "
        "move it away"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [("zstandard", "plan"), ("pyroute2", "shaped")])
def test_what_all_commands_or_emulated_networks_need(
    run_file: Path, package: str, name: str
) -> None:
    done = without(package, run_file.parent, *command(name, run_file))
    message = f"error: the package {package!r} is not installed; run {install(package)}\n"
    assert (done.returncode, done.stderr) == (2, message)


def huggingface_run(run_file: Path) -> None:
    saved_model("gpt2", run_file.parent / "gpt2")
    text = run_file.read_text(encoding="utf-8")
    model = f'[model]\npretrained = "{run_file.parent / "gpt2"}"\nlora = {{ rank = 2 }}\n'
    run_file.write_text(re.sub(r"\[model\].*?(?=\[data\])", model, text, flags=re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name"),
    [
        *(("transformers", name) for name in ("train", "plan", "doctor", "export")),
        ("peft", "train"),
    ],
)
def test_models_from_a_folder(run_file: Path, package: str, name: str) -> None:
    huggingface_run(run_file)
    done = without(package, run_file.parent, *command(name, run_file))
    assert (done.returncode, done.stdout) == (2, "")
    message = f"error: the package {package!r} (extra 'hf') is not installed; run {HF}\n"
    assert done.stderr == message


@pytest.mark.slow
def test_ranks_that_torchrun_started(run_file: Path) -> None:
    huggingface_run(run_file)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = command("train", run_file, "pipeline.cuts=[]")
    done = without("peft", run_file.parent, *arguments, **environment)
    assert done.returncode in (1, 2)
    message = f"rank 0: the package 'peft' (extra 'hf') is not installed; run {HF}"
    assert done.stderr == f"{message}\n"


@pytest.mark.slow
@pytest.mark.dist
def test_own_modules_next_to_the_run_file_are_left_alone(run_file: Path) -> None:
    """A user's own modules next to the run file are neither executed nor named."""
    folder = run_file.parent
    for name in ("launch", "pipeline", "thinpipe"):
        (folder / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    (folder / "hidden").mkdir()
    settings = ("pipeline.cuts=[]", "train.epochs=1")
    arguments = command("train", run_file, *settings)
    done = without("wandb", folder / "hidden", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "report.html").exists()
    for name in ("not ours", "launch.py", "pipeline.py", "thinpipe.py"):
        assert name not in done.stdout + done.stderr


def test_extras_are_those_of_the_package() -> None:
    found = [re.match(r"([\w-]+).*extra == \W(\w+)", line) for line in requires("thinpipe") or []]
    extras = {match[1]: match[2] for match in found if match and match[2] not in ("dev", "docs")}
    extras["optimi"] = extras.pop("torch-optimi")  # its module
    assert extras == {name: extra for name, extra in EXTRAS.items() if name != "tokenizers"}
