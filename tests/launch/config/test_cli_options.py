"""Usage errors: option, value, remedy; missing files by their path."""

import os
from pathlib import Path

import pytest

from thinpipe.launch.cli import app
from thinpipe.launch.config.cli_options import Machines, is_rank, run_app
from thinpipe.launch.host.packages import versions


def rejected(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        run_app(app, [str(argument) for argument in arguments])
    assert ended.value.code == 2
    output, error = capfd.readouterr()
    assert not output
    assert error.startswith("error: ")
    return error.removeprefix("error: ").rstrip("\n")


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
        (["train"], "Missing argument 'RUN.TOML'; --help lists arguments and options"),
        (["trian"], "No such command 'trian'. Did you mean 'train'"),
        (["version"], "No such command 'version'; did you mean --version?"),
        (["train", "x.toml", "y z"], "y z: unexpected argument; put text with spaces in quotes"),
        (["train", "x.toml", "--nnodes", "2"], "--nnodes = 2: give one of the machines: --rdzv"),
        (["doctor", "x.toml", "--ranks", "2"], "--ranks = 2: without --nnodes and --rdzv all"),
        (["train", "x.toml", "--nnodes", "0"], "--nnodes = 0: use 1 or more"),
        (["export", "no/run", "out"], "no/run: holds no config.toml; name the folder of a run"),
        (["generate", "no/run", "--prompt", "a"], "no/run: holds no config.toml; name the folder"),
    ],
)
def test_an_option_that_cannot_be_read_is_named_with_its_remedy(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert rejected(capfd, *arguments).startswith(message)


def test_an_unknown_machine_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[[host]]\nname = "alfa"\ncheckout = "thinpipe"')
    error = rejected(capfd, "launch", hosts, "run.toml", "--show", "abc")
    assert error == "--show = 'abc': no such machine; use one of alfa"
    error = rejected(capfd, "train", hosts)
    assert error.startswith(f"{hosts}: this is a hosts file; pass it to `thinpipe launch`")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "gone.toml"], "gone.toml: no such file, seen from {cwd}; correct the path"),
        (["launch", "gone.toml", "run.toml"], "gone.toml: no such file, seen from {cwd}; "),
        (["trace", "gone"], "gone: no such folder; give that of a finished run"),
        (
            ["shaped", "--matrix", "gone.json", "--", "true"],
            "--matrix = gone.json: No such file or directory; correct the path, or write ",
        ),
        (
            ["plan", "run.toml", "--network", "gone.json"],
            "--network = gone.json: No such file or directory; correct the path, or write ",
        ),
        (
            ["train", "run.toml", "--set", "data.path=gone.txt"],
            "data.path = 'gone.txt': no such file or folder, seen from {cwd}; correct the path",
        ),
        (
            ["train", "run.toml", "--set", "data.tokenizer=gone"],
            "data.tokenizer = 'gone': no such folder, seen from {cwd}; name one with tokenizer",
        ),
        *[
            (
                ["train", "run.toml", "--dry-run", "--set", f"{setting}=~nobody9/x"],
                "~nobody9/x: the home folder of ~nobody9 is not known; write the path in full",
            )
            for setting in ("data.path", "data.tokenizer", "run.folder")
        ],
        (
            ["doctor", "run.toml", "--save", "gone/net.json"],
            "--save = gone/net.json: no such folder; create it, or use another",
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
    assert rejected(capfd, *arguments).startswith(message.format(cwd=os.getcwd()))


def test_version_option_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_app(app, ["--version"])
    assert not ended.value.code
    printed = dict(part.split(" ") for part in capsys.readouterr().out.strip().split(", "))
    assert printed == versions()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_flags_take_no_value_in_help(
    capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit):
        run_app(app, arguments)
    shown = capfd.readouterr().out
    assert "--help" in shown
    assert "bool" not in shown


def test_who_is_told_where_machines_meet_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`thinpipe shaped` gives each host a place; torch's agents start ranks."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "thinpipe")
    Machines(2, "host0:29500").leave_place()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    Machines().leave_place()
    assert is_rank()
    Machines(join="host0:29500").leave_place()
    assert not is_rank()
    assert not {*place} & {*os.environ}
