"""What needs no model is answered without importing torch, and as the commands would."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.invoking import said
from tests.programs import ran
from thinpipe.launch import cli, completion
from thinpipe.launch.cli import all_commands

LEAN = {
    "": True,
    "[pipeline]\ncuts = []\n": True,
    "[model]\nlayers = 2\n": True,
    "[pipeline]\ncuts = [1]\n": False,
    '[pipeline]\ncuts = "auto"\n': False,
    "[model]\nactivation_checkpointing = true\n": False,
    "pipeline = 3\n": False,
}


@pytest.mark.parametrize("text", LEAN)
@pytest.mark.parametrize("join", [True, False])
def test_newcomers_without_cuts_start_without_torchs_compiler(
    text: str, join: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.toml").write_text(text, encoding="utf-8")
    (tmp_path / "run.toml").write_text('extends = "base.toml"', encoding="utf-8")
    found = []

    def started(*, lean: bool) -> None:
        found.append(lean)
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    where = ["--join", "127.0.0.1:1"] if join else []
    monkeypatch.setattr(sys, "argv", ["thinpipe", "train", str(tmp_path / "run.toml"), *where])
    for name in ("outlive_terminal", "use_scratch_folder", "leave_first_process"):
        monkeypatch.setattr(cli, name, lambda: None)
    monkeypatch.setattr(cli.fork_server, "start", started)
    with pytest.raises(SystemExit):
        cli.main()
    assert found == [LEAN[text] and join]


HEAVY = {"torch", "transformers", "numba", "pandas"}
QUICK = {
    "help": (["--help"], 0, "Train transformers over slow networks"),
    "version": (["--version"], 0, "torch "),
    "command": (["trian", "run.toml"], 2, "No such command 'trian'. Did you mean 'train'"),
    "option": (
        ["train", "run.toml", "--resum"],
        2,
        "--resum: no such option; did you mean --resum",
    ),
    "of plan": (["plan", "run.toml", "--rates=1mbit"], 2, "--rates: no such option; did you mean"),
    "value": (["train", "run.toml", "--nnodes", "0"], 2, "--nnodes = 0: use 1 or more"),
    "no file": (["train", "none.toml"], 2, "none.toml: no such file, seen from "),
    "TOML": (["train", "bad.toml"], 2, "bad.toml: cannot be read as TOML: "),
    "train --help": (["train", "--help"], 0, "--dry-run"),
}


def test_mistakes_import_nothing_heavy(tmp_path: Path) -> None:
    """All in forks of one process, which asks each what it imported."""
    (tmp_path / "bad.toml").write_text("[run\n")
    code = f"""
import json, os, sys
from thinpipe.launch import __main__, cli
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        sys.argv = ["thinpipe", *words]
        try:
            os.dup2(1, 2)
            __main__.main()
        except SystemExit as end:
            print("code", end.code, sorted({HEAVY!r} & set(sys.modules)))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    commands = json.dumps([words for words, *_ in QUICK.values()])
    done = ran(sys.executable, "-c", code, commands, cwd=tmp_path)
    answers = done.stdout.split("code ")
    for (name, (_, exit_code, words)), answer, ended in zip(
        QUICK.items(), answers, answers[1:], strict=False
    ):
        assert words in answer, (name, done.stdout, done.stderr)
        assert ended.startswith(f"{exit_code} []\n"), (name, ended)


def test_an_option_that_a_parser_knows_is_never_rejected_before(tmp_path: Path) -> None:
    """The list that answers for a command not yet imported is that of its parser."""

    def options(command: Any) -> set[str]:
        return {o for p in command.params for o in p.opts if o.startswith("--")} - {"--help"}

    listed = json.loads(completion.LIST.read_text(encoding="utf-8"))
    commands = all_commands()
    assert list(commands) == list(listed)
    for name, command in commands.items():
        if "options" in listed[name]:
            assert options(command) == set(listed[name]["options"]), name


@pytest.mark.parametrize(
    "words", [["--prompt", "--help me"], ["--prompt=--x"], ["--prompt", "--x"]]
)
def test_the_value_of_an_option_may_look_like_one(words: list[str], tmp_path: Path) -> None:
    assert "holds no config.toml" in said("generate", tmp_path, *words, code=2)


def test_the_package_itself_is_the_command() -> None:
    names = ("thinpipe", "thinpipe.launch")
    one, other = (ran(sys.executable, "-m", name, "--version").stdout for name in names)
    assert one == other
    assert one.startswith("thinpipe ")
