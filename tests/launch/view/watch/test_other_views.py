"""The same numbers as a file, a picture, and in a terminal."""

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from tests.invoking import printed
from tests.pages import messages_of
from tests.records import step_record
from tests.runs import EVIL, HOSTS, records, served, write_run
from thinpipe.launch.host import disk
from thinpipe.launch.view.report.journal import Journal, Told
from thinpipe.launch.view.watch import terminal
from thinpipe.launch.view.watch.follow import Followed
from thinpipe.launch.view.watch.share import draw

run = partial(printed, "watch")
rejected = partial(run, code=2)


def test_an_exported_page_holds_what_a_live_one_shows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    assert run(folder, "--export", tmp_path / "page.html") == f"{tmp_path / 'page.html'}\n"
    (message,) = messages_of(tmp_path / "page.html")
    moment = Followed(folder).moment
    assert moment is not None
    assert message.pop("silence") == ""
    assert message.pop("told_s") == pytest.approx(time.time(), abs=60)
    assert message == json.loads(moment.since(0, None))


def test_several_runs_go_into_one_page(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, records(20), name=name) for name in ("a", "b")]
    run(*folders, "--export", tmp_path / "page.html")
    *_, last = messages_of(tmp_path / "page.html")
    assert last["names"] == ["a", "b"]


def test_a_picture_has_the_size_of_previews(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(seed), records(60, seed=seed), name=f"$x_{seed}$ {EVIL}")
        for seed in range(2)
    ]
    run(*folders, "--share", tmp_path / "image.png")
    picture = imread(tmp_path / "image.png")
    assert picture.shape == (630, 1200, 4)
    alone = tmp_path / "alone.png"
    run(folders[0], "--share", alone)
    assert (imread(alone) != picture).any(), "the other run's loss is in it"
    assert "name a file that ends in .png" in rejected(folders[0], "--share", tmp_path / "a.doc")


def test_a_run_on_one_machine_with_one_stage_has_a_picture_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "run", [])
    assert "no step was recorded" in rejected(tmp_path / "run", "--share", tmp_path / "a.png")
    story = Followed(write_run(tmp_path / "one", [step_record(1)], cuts=())).story
    assert story is not None
    draw([replace(story, places=[], summary={**story.summary, "edges": []})], tmp_path / "a.png")
    assert imread(tmp_path / "a.png").shape == (630, 1200, 4)
    assert not caplog.records, "matplotlib had to leave something out"


def test_a_terminal_shows_the_numbers_of_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    text = run(folder, "--terminal")
    assert "Step 20 of 40." in text
    assert f"stage 0: {HOSTS[0]}" in text
    assert "hadamard" in text
    assert re.search(r"warning: channel 5 is massive", text)
    assert "several" not in text
    assert "name one" in rejected(folder, folder, "--terminal")


def test_a_terminal_shows_a_run_of_another_machine(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    with served(folder, listen="0.0.0.0") as (port, links):
        token = links[0].partition("#")[2]
        text = run(f"http://127.0.0.1:{port}/#{token}", "--terminal")
        assert text == run(folder, "--terminal")
        assert "401, use the whole link" in rejected(f"http://127.0.0.1:{port}/", "--terminal")
    assert "is the run's page still served there" in rejected(f"http://127.0.0.1:{port}/",
                                                             "--terminal")  # fmt: skip


@contextmanager
def stand_in(
    status: int, headers: dict[str, str], body: bytes
) -> Iterator[tuple[str, list[str | None]]]:
    """A server that gives one answer to everything, and the tokens that it was given."""
    tokens: list[str | None] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", tokens
        server.shutdown()


def test_a_link_whose_server_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = Followed(write_run(tmp_path / "run", records(20))).moment
    assert moment is not None
    with stand_in(200, {}, b"data: {}\n\n") as (link, _):
        assert f"error: {link}: its server has ended" in rejected(link, "--terminal")
    cut_off = {"Content-Length": "99999999"}
    for headers in ({}, cut_off):
        screen = Console(file=io.StringIO(), force_terminal=True, width=120)
        monkeypatch.setattr(terminal, "Console", lambda screen=screen, **_: screen)
        with stand_in(200, headers, f"data: {moment.since(0, None)}\n\n".encode()) as (link, _):
            assert f"error: {link}: " in rejected(link, "--terminal")
        assert isinstance(screen.file, io.StringIO)
        assert "Step 20 of 40." in screen.file.getvalue()


def test_a_token_goes_nowhere_else(tmp_path: Path) -> None:
    with stand_in(200, {}, b"") as (other, stolen):
        with stand_in(302, {"Location": f"{other}\x1b[2J"}, b"") as (link, tokens):
            said = rejected(f"{link}#secret", "--terminal")
        assert (tokens, stolen) == (["Bearer secret"], [])
    assert f"302, it leads to {other}" in said
    assert "\x1b" not in said


def test_a_terminal_leaves_a_run_that_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", records(20))
    with Journal(Told(folder).info, []):
        pass
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(terminal, "Console", lambda **_: screen)
    monkeypatch.setattr(terminal, "sleep", lambda _: pytest.fail("it waits for more"))
    terminal.show([str(folder)])
    assert isinstance(screen.file, io.StringIO)
    assert "Ended after step 20 of 40." in screen.file.getvalue()


def test_a_terminal_obeys_no_text_of_others(tmp_path: Path) -> None:
    evil = "\x1b]0;pwned\x07\x1b[2J[bold]not markup[/bold]\u202e"
    folder = write_run(tmp_path / "run", records(4), name=evil)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    console.print(terminal.frame(next(terminal._states(str(folder)))))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[bold]not markup[/bold]" in text


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    for options in ([], ["--terminal"], ["--export", "x.html"]):
        problem = f"{tmp_path}: holds no state.json, so it is no run's folder"
        assert problem in rejected(tmp_path, *options)
    for name in ("b", "a"):
        write_run(tmp_path / name, records(2))
    assert f"{tmp_path}: is not a run's folder; it contains the runs a, b: name one" in rejected(
        tmp_path
    )
    assert "no such folder; name that of a run" in rejected(tmp_path / "c")
    (tmp_path / "a/state.json").unlink()
    assert "an earlier version trained it; run `thinpipe report" in rejected(tmp_path / "a")


def test_a_run_that_has_just_been_started_is_waited_for(tmp_path: Path) -> None:
    with (tmp_path / disk.RUN_LOCK).open("w") as lock:
        disk.lock(lock)
        run = Followed(tmp_path)
        assert run.moment is None
        write_run(tmp_path, records(3))
        assert run.refresh()
    assert run.moment is not None


def test_a_run_that_ends_before_it_has_written_anything_is_a_problem(tmp_path: Path) -> None:
    with (tmp_path / disk.RUN_LOCK).open("w") as lock:
        disk.lock(lock)
        run = Followed(tmp_path)
        assert not run.refresh()
    run.refresh()
    run.refresh()
    assert "the run's process is gone, before its first step" in run.problem


def test_what_an_option_cannot_do_is_rejected(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(2))
    words = rejected(folder, "--terminal", "--listen", "0.0.0.0:9", "--share", "a.png")
    assert "--terminal shows the numbers here alone; remove --listen, --share" in words
    assert "open the link in a browser, or add --terminal" in rejected("http://localhost:1/")
    assert "this machine has no such address; it has" in rejected(folder, "--listen", "192.0.2.1:9")


@pytest.mark.parametrize("steps", [1, 2, 39, 40])
def test_a_short_run_is_shown_everywhere(steps: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(40)[:steps])
    assert ("Finished." in run(folder, "--terminal")) == (steps == 40)
    run(folder, "--share", tmp_path / "a.png", "--export", tmp_path / "a.html")
    assert messages_of(tmp_path / "a.html")[0]["parts"]["head"]["done"] == steps
