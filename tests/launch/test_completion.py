"""Shell completion: every command and option, at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ran
from thinpipe.launch import completion
from thinpipe.launch.cli import all_commands


def test_the_list_is_that_of_the_code() -> None:
    assert completion.LIST.read_text(encoding="utf-8") == completion.written(all_commands()), (
        "run `python -m thinpipe.launch.cli`, and commit launch/completion.json"
    )


def answer(words: str, *options: str) -> subprocess.CompletedProcess[str]:
    asked = {"COMP_WORDS": f"thinpipe {words}", "COMP_CWORD": str(len(words.split()))}
    asked["_THINPIPE_COMPLETE"] = "complete_bash"
    return ran(sys.executable, *options, "-m", "thinpipe.launch", **asked)


@pytest.mark.parametrize(
    ("words", "found"),
    [("key n", ["new"]), ("launch hosts.toml run.toml --max", ["--max-restarts"])],
)
def test_words_are_completed(words: str, found: list[str]) -> None:
    assert answer(words).stdout.split() == found


def test_nobody_waits_for_torch() -> None:
    done = answer("tr", "-X", "importtime")
    assert done.stdout.split() == ["train", "trace"]
    assert "typer" in done.stderr
    assert "torch" not in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_after_the_installation(tmp_path: Path) -> None:
    place = Path(sys.executable).parent
    environment = {"HOME": str(tmp_path), "PATH": f"{place}:{os.environ['PATH']}"}
    # the shell is the one that is named, not the one that runs the tests
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    ran(f"{place}/thinpipe", "--install-completion", "bash", **environment)
    (installed,) = (tmp_path / ".bash_completions").iterdir()
    assert str(installed) in (tmp_path / ".bashrc").read_text(encoding="utf-8")
    typed = f"""
        source {installed}
        function=$(complete -p thinpipe | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        COMP_WORDS=(thinpipe gen) COMP_CWORD=1
        $function "{place}/thinpipe"
        echo "${{COMPREPLY[@]}}"
    """
    done = ran("bash", "-c", typed, code=None, **environment)
    assert done.stdout.strip() == "generate", done.stderr
