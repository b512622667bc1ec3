"""Every command in the documentation exists; quick ones are run as they stand, in this process."""

import argparse
import importlib.util
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.main import get_command

from tests.launch.test_train import RUN
from tests.often import mostly_slow
from tests.texts import write_squares
from thinpipe.launch.cli import all_commands, app
from thinpipe.launch.config.cli_options import run_app
from thinpipe.launch.lab.cli import set_app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PROGRAM = re.compile(r"(?:\.venv/bin/)?(thinpipe|torchrun|python|make|pip|hf) .*")
ALL = all_commands()

RUN_HERE = (
    "thinpipe launch hosts.toml run.toml --dry-run",
    "thinpipe plan run.toml --network net.json",
    "thinpipe plan run.toml --network net.json --apply",
    "thinpipe plan run.toml --rate 100mbit --delay 20ms",
    "thinpipe train run.toml --dry-run",
)
RUN_ELSEWHERE = {  # by their beginnings: where, or why not
    "thinpipe train run.toml --nnodes 3": "tests/docs/test_commands.py",
    "torchrun --nnodes 3": "tests/docs/test_commands.py",
    "thinpipe train run.toml": "tests/launch/test_train.py",
    "thinpipe train examples/": "tests/launch/test_examples.py, or it needs a download",
    "thinpipe run ": "tests/launch/run/test_program.py",
    "torchrun --nproc-per-node 4 mine.py": "tests/launch/run/test_program.py",
    "thinpipe train chat.toml": "tests/launch/trained/test_chat.py",
    "thinpipe plan chat.toml": "as for run.toml",
    "thinpipe plan run.toml --network net.json --place": "tests/launch/plan/choice",
    "thinpipe stop ": "tests/launch/test_stop.py, tests/launch/run/elastic/test_hosts.py",
    "thinpipe trace ": "tests/launch/test_train.py",
    "thinpipe export ": "tests/launch/trained/test_export_hf.py",
    "thinpipe report ": "tests/launch/run/test_report_command.py",
    "thinpipe watch ": "tests/launch/view/watch",
    "thinpipe generate ": "tests/launch/trained/test_model.py",
    "thinpipe init": "tests/launch/starter",
    "thinpipe --install-completion": "tests/launch/test_completion.py",
    "thinpipe key ": "tests/launch/net/overlay/test_keys.py",
    "thinpipe doctor ": "tests/launch/doctor",
    "thinpipe launch hosts.toml": "tests/launch/net/ssh",
    "thinpipe shaped ": "tests/launch/lab",
    "python -m benchmarks.": "tests/benchmarks",
    "make ": "installs, and runs all tests",
    "pip install ": "needs a network",
    "hf download ": "needs a network",
}


def commands() -> Iterator[str]:
    """Lines of shell blocks, whole commands amid a sentence, and those in comments of examples."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        shell = (block for kind, block in blocks if kind in ("", "sh"))
        yield from (line.strip() for block in shell for line in block.splitlines())
        yield from re.findall(r"`(thinpipe [^`]*(?:\.toml|runs/)[^`]*|python -m [^`]*)`", text)
    for example in EXAMPLES:
        text = example.read_text(encoding="utf-8").replace("\\\n#", " ")
        yield from re.findall(
            r"^#.*?(?:     |: )((?:thinpipe|torchrun|hf) .*)$", text, re.MULTILINE
        )


def words(line: str) -> list[str]:
    """As a shell splits them, without the comment and the folder of the program."""
    program, *rest = shlex.split(line, comments=True)
    return [program.removeprefix(".venv/bin/"), *rest]


FOUND = sorted({shlex.join(words(line)) for line in commands() if PROGRAM.fullmatch(line)})


def test_commands_are_found_wherever_they_are() -> None:
    starts = ("thinpipe launch", "thinpipe shaped set", "thinpipe trace", "python -m benchmarks.")
    for start in (*starts, "hf download", "torchrun --nnodes 3", "make test"):
        assert any(line.startswith(start) for line in FOUND), start
    assert set(RUN_HERE) <= set(FOUND)


def test_every_command_is_run_or_it_is_known_where_or_why_not() -> None:
    rest = set(FOUND) - set(RUN_HERE)
    for line in rest:
        assert any(line.startswith(start) for start in RUN_ELSEWHERE), f"{line}: run it, or list it"
    for start in RUN_ELSEWHERE:
        assert any(line.startswith(start) for line in rest), f"{start}: in no page any more"


def test_every_command_of_ours_is_in_a_page() -> None:
    for name in ALL:
        assert any(f"thinpipe {name} " in f"{line} " for line in FOUND), name


@pytest.mark.parametrize("line", FOUND)
def test_options_exist(line: str) -> None:
    parse(words(line))


def parse(line: list[str]) -> None:
    """Let the command line, and those of the commands that it starts, read their options."""
    program, *arguments = line
    if "..." in arguments:
        return
    if program == "thinpipe" and not arguments[0].startswith("--"):
        name, *arguments = arguments
        is_set = arguments[:1] == ["set"]
        reader: Any = get_command(set_app) if is_set else ALL[name]
        context = reader.make_context(name, arguments[is_set:])
        if name == "shaped" and context.params.get("command"):
            parse([Path(context.params["command"][0]).name, *context.params["command"][1:]])
    elif program == "torchrun" and "thinpipe.launch" in arguments:
        parse(["thinpipe", *arguments[arguments.index("thinpipe.launch") + 1 :]])
    elif arguments[:1] == ["-m"]:
        assert importlib.util.find_spec(arguments[1]) is not None


def measured() -> Iterator[str]:
    """Commands in blocks of results pages, by which figures are made again."""
    for page in RESULTS:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        yield from re.findall(r"^    (?:\w+=\S+ )*(python -m .*)$", text, re.MULTILINE)


class ReadError(Exception):
    """A benchmark has read its options."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("line", sorted({*measured()}))
def test_benchmarks_have_the_options_of_results(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        read(parser, *arguments)
        raise ReadError

    _, _, module, *arguments = words(line)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr("sys.argv", [module, *arguments])
    with pytest.raises(ReadError):
        runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("line", mostly_slow(RUN_HERE, lambda line: "net.json" not in line))
def test_quick_commands_succeed_as_they_stand(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_squares(Path("text.txt"))
    Path("run.toml").write_text(RUN.format(folder="run", text="text.txt").replace("[1, 3]", "[2]"))
    (hosts,) = re.findall(
        r"```toml\n(# hosts.toml.*?)```",
        (ROOT / "docs/machines.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    Path("hosts.toml").write_text(hosts)
    Path("net.json").write_text(json.dumps({"rate_bps": [[None, 1e8], [1e8, None]]}))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    profile = "thinpipe.launch.cuts.profile"
    monkeypatch.setattr(f"{profile}._LEAST_S", 0.0)  # of measuring each block
    monkeypatch.setattr(f"{profile}._MOST_S", 0.0)
    monkeypatch.setattr(f"{profile}.interference_warning", lambda *_, **__: None)  # it is busy
    monkeypatch.setattr("sys.argv", words(line))
    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert not ended.value.code
