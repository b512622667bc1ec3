"""What the command line refuses: option, value, remedy; files that are not there by their path."""

import os
from pathlib import Path

import pytest

from thinpipe.launch.cli import app
from thinpipe.launch.config.cli_options import run_app
from thinpipe.launch.distributed.handshake import versions


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        run_app(app, [str(argument) for argument in arguments])
    assert ended.value.code == 2
    output, said = capfd.readouterr()
    assert not output
    assert said.startswith("error: ")
    return said.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "x.toml", "--show", "abc"], "--show = abc: give a whole number"),
        (["train", "x.toml", "--show=-5"], "--show = -5: use -1 or more"),
        (["train", "x.toml", "--resume", "--step", "x"], "--step = x: give a whole number"),
        (["train", "x.toml", "--shwo", "1"], "--shwo: no such option; did you mean --show?"),
        (["doctor", "x.toml", "--seconds", "soon"], "--seconds = soon: give a number"),
        (["export", "a", "b", "--dtype", "z"], "--dtype = z: "),
        (["shaped", "set", "--run", "x"], "--run = x: give a whole number"),
        (["train"], "Missing argument 'RUN.TOML'; --help shows what can be given"),
        (["trian"], "No such command 'trian'. Did you mean 'train'"),
    ],
)
def test_an_option_that_cannot_be_read_is_named_with_its_remedy(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert refused(capfd, *arguments).startswith(message)


def test_a_machine_that_the_hosts_file_lacks_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[[host]]\nname = "alfa"\ncheckout = "thinpipe"')
    said = refused(capfd, "launch", hosts, "run.toml", "--show", "abc")
    assert said == "--show = 'abc': no such machine; there are alfa"
    said = refused(capfd, "train", hosts)
    assert said.startswith(f"{hosts}: this is a hosts file; `thinpipe launch` takes it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "gone.toml"], "gone.toml: no such file, seen from {cwd}; correct the path"),
        (["launch", "gone.toml", "run.toml"], "gone.toml: no such file, seen from {cwd}; "),
        (["trace", "gone"], "gone: no folder; give that of a finished run"),
        (
            ["shaped", "--matrix", "gone.json", "--", "true"],
            "--matrix = gone.json: No such file or directory; correct the path, or have ",
        ),
        (
            ["plan", "run.toml", "--network", "gone.json"],
            "--network = gone.json: No such file or directory; correct the path, or have ",
        ),
        (
            ["train", "run.toml", "--set", "data.path=gone.txt"],
            "data.path = 'gone.txt': no such file or folder, seen from {cwd}; correct the path",
        ),
        (
            ["train", "run.toml", "--set", "data.tokenizer=gone"],
            "data.tokenizer = 'gone': no such folder, seen from {cwd}; name one with tokenizer",
        ),
        (
            ["doctor", "run.toml", "--save", "gone/net.json"],
            "--save = gone/net.json: no such folder; make it, or name another",
        ),
    ],
)
def test_a_missing_file_is_named_with_what_to_do(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("")
    assert refused(capfd, *arguments).startswith(message.format(cwd=os.getcwd()))


def test_versions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_app(app, ["--version"])
    assert not ended.value.code
    told = dict(part.split(" ") for part in capsys.readouterr().out.strip().split(", "))
    assert told == versions()
