"""Ctrl-C before there are ranks ends a command without a word."""

import sys
from pathlib import Path

import pytest

from thinpipe.launch import __main__, cli

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def test_ctrl_c_while_packages_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["thinpipe", "train", str(QUICKSTART)])
    monkeypatch.setattr(cli, "outlive_terminal", lambda: None)
    monkeypatch.setattr(cli, "use_scratch_folder", lambda: None)
    monkeypatch.setattr(cli.fork_server, "start", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")
