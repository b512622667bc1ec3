"""Rendezvous that fail."""

import os

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from thinpipe.launch.cli import main
from thinpipe.launch.net.ranks import elastic as spawn
from thinpipe.launch.net.ranks.elastic import (
    run_local,
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RendezvousClosedError(), "another machine ended the run"),
        (
            RendezvousConnectionError("reset"),
            "or the machine there ended the run: reset",
        ),
        (RendezvousTimeoutError(), "RendezvousTimeoutError; run `thinpipe doctor` on each"),
    ],
)
def test_rendezvous_failures_are_explained(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: RendezvousError,
    message: str,
) -> None:
    def launch(*_: object) -> object:
        raise error

    monkeypatch.setattr(os, "environ", {**os.environ})  # what a launcher sets ends with this test
    monkeypatch.setattr(spawn, "elastic_launch", lambda *_: launch)
    monkeypatch.setattr(spawn.fork_server, "start", lambda: None)
    assert run_local(main, ["train"], 1) == 1
    assert message in capfd.readouterr().err
