"""The page in a real browser: live, on a phone, by keyboard, for a screen reader."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import DESKTOP, PHONE, Browser, browser
from tests.commands import Command
from tests.launch.test_train import run_file
from tests.ports import free_port
from tests.runs import EVIL, HOSTS, append, records, served, trainer, write_run
from tests.waiting import until
from thinpipe.launch.view.report.journal import Journal, Told, add_note
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.launch.view.watch.cli import watch

__all__ = ["run_file"]
RIGHT, LEFT, HOME, END = "\ue014", "\ue012", "\ue011", "\ue010"
PLOT = "#loss .plot"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def tab(window: Browser) -> Browser:
    """Empty: what it says of the page before, whose server is gone by now, is not for this test."""
    window.driver.get("about:blank")
    window.complaints()
    return window


def exported(folder: Path, count: int, *, name: str = "run") -> str:
    write_run(folder, records(count), name=name, total_steps=count)
    watch([str(folder)], export=folder / "page.html")
    return (folder / "page.html").as_uri()


def open_finished(
    tab: Browser, folder: Path, count: int, width: int, height: int, *, dark: bool = False
) -> None:
    """The page of a run of so many steps that is over."""
    tab.resize(width, height, dark=dark)
    tab.open(exported(folder / "run", count))
    tab.wait(lambda: "Finished." in tab.text("#state"))


def visible(tab: Browser) -> list[str]:
    return list(
        tab.run("return [...document.querySelectorAll('section:not([hidden])')].map(s => s.id)")
    )


def test_a_page_follows_a_run(tab: Browser, tmp_path: Path) -> None:
    steps = records(40)
    tab.resize(*DESKTOP)
    with served(write_run(tmp_path / "run", [])) as (port, _):
        tab.open(f"http://localhost:{port}/")
        tab.wait(lambda: "Waiting for the first step" in tab.text("#state"))
        append(tmp_path / "run", steps[:10])
        tab.wait(lambda: "Live. Step 10 of 40. About" in tab.text("#state"))
        assert tab.text("#cards .card:last-child strong") == "2.5 s"
        append(tmp_path / "run", steps[10:39])
        add_note(tmp_path / "run", "warning: it is slow", 39)
        tab.wait(lambda: "Step 39 of 40" in tab.text("#state"))
        tab.wait(lambda: "it is slow" in tab.text("#notes"))
        assert tab.run("return document.querySelectorAll('#loss canvas').length") == 1
        write_run(tmp_path / "run", steps)
        append(tmp_path / "run", steps[39:])
        tab.wait(lambda: "Finished." in tab.text("#state"))
        assert tab.run("return document.getElementById('progress').hidden")
        assert visible(tab) == [
            *("loss", "speed", "bytes", "error", "places", "edges", "samples", "notes", "details")
        ]
        assert tab.complaints() == []
    tab.wait(lambda: "No connection to the run's machine" in tab.text("#state"))
    assert all("net::ERR" in complaint for complaint in tab.complaints())


def test_a_page_says_what_is_wrong_and_that_a_run_ended_early(tab: Browser, tmp_path: Path) -> None:
    tab.resize(*DESKTOP)
    folder = write_run(tmp_path / "run", records(20))
    state = folder / "state.json"
    with served(folder) as (port, _):
        tab.open(f"http://localhost:{port}/")
        tab.wait(lambda: tab.text("#state").startswith("Live. Step 20 of 40."))
        good = state.read_text()
        state.write_text(json.dumps({**json.loads(good), "now": 3}))
        tab.wait(lambda: "state.json: not the state of a run" in tab.text("#state"))
        state.write_text(good)
        tab.wait(lambda: tab.text("#state").startswith("Live. Step 20 of 40."))
        with Journal(Told(folder).info, []):
            pass
        tab.wait(lambda: tab.text("#state") == "Ended after step 20 of 40.")
        assert tab.run("return document.getElementById('progress').hidden")
        assert tab.complaints() == []


def test_a_page_says_that_a_run_was_killed(tab: Browser, tmp_path: Path) -> None:
    tab.resize(*PHONE)
    folder = write_run(tmp_path / "run", records(20))
    with trainer(folder) as process, served(folder) as (port, _):
        os.utime(folder / "metrics.jsonl", times=(time.time() - 100,) * 2)
        tab.open(f"http://localhost:{port}/")
        tab.wait(lambda: tab.text("#state").startswith("Step 20 of 40. No step for 1 min 4"))
        process.kill()
        gone = "Ended after step 20 of 40: its process is gone, and did not say why."
        tab.wait(lambda: tab.text("#state") == gone)
        assert tab.complaints() == []
    watch([str(folder)], export=folder / "page.html")
    tab.open((folder / "page.html").as_uri())
    tab.wait(lambda: tab.text("#state") == gone)


def test_a_file_of_a_run_that_goes_on_says_of_when_it_is(tab: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    os.utime(folder / "metrics.jsonl", times=(time.time() - 100,) * 2)
    watch([str(folder)], export=folder / "page.html")
    tab.open((folder / "page.html").as_uri())
    tab.wait(lambda: "Step 20 of 40. No step for 1 min 40 s; one usually" in tab.text("#state"))
    assert re.search(r"As of \d+/\d+/\d{4}, ", tab.text("#state"))


@pytest.mark.slow
@pytest.mark.dist
def test_a_page_is_live_while_a_run_trains(tab: Browser, run_file: Path) -> None:
    port = free_port()
    settings = (
        f"watch.port={port}",
        "train.epochs=60",
        "eval.samples=2",
        "checkpoint.every_steps=99",
    )
    run = Command("train", run_file, *(word for s in settings for word in ("--set", s)))
    tab.resize(*PHONE)
    metrics = run_file.parent / "run" / "metrics.jsonl"
    try:
        until(lambda: metrics.is_file() and metrics.stat().st_size)
        tab.open("about:blank")

        def is_there() -> bool:
            try:
                tab.open(f"http://localhost:{port}/")
            except Exception:  # refused as yet
                return False
            return True

        tab.wait(is_there)
        tab.wait(lambda: "Live. Step" in tab.text("#state"))
        first = tab.text("#state")
        tab.wait(lambda: tab.text("#state") != first)
        seen = tab.run("return runs[0].columns.loss")
        tab.wait(lambda: f"watch at http://localhost:{port}/" in tab.text("#notes"))
        assert all("net::ERR_CONNECTION_REFUSED" in complaint for complaint in tab.complaints())
        tab.wait(lambda: tab.text("#state") == "Finished.")
        assert tab.run("return runs[0].columns.step.at(-1)") == 300
        tab.wait(lambda: "samples" in visible(tab))
        assert tab.complaints() == []
    finally:
        done = run.done()
    assert done.returncode == 0, done.stderr
    losses = [record.loss for record in read_metrics(metrics)]
    assert len(losses) == 300
    assert seen == pytest.approx(losses[: len(seen)], rel=1e-6)
    tab.open((run_file.parent / "run" / "report.html").as_uri())
    tab.wait(lambda: tab.text("#state") == "Finished.")
    assert "samples" in visible(tab)
    assert tab.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_a_finished_run_is_whole_and_accessible(
    tab: Browser, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    open_finished(tab, tmp_path, 200, *size, dark=dark)
    assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("return document.querySelectorAll('canvas').length") == 6
    assert tab.complaints() == []
    small = """return [...document.querySelectorAll('button, select')].filter(
        b => b.offsetHeight < arguments[0] || b.offsetWidth < arguments[0]).length"""
    assert tab.run(small, 44 if size == PHONE else 24) == 0
    assert tab.axe() == []


def test_text_of_others_is_shown_and_runs_nothing(tab: Browser, tmp_path: Path) -> None:
    tab.resize(*DESKTOP)
    with served(write_run(tmp_path / "run", records(20), name=EVIL)) as (port, _):
        for link in (f"http://localhost:{port}/", exported(tmp_path / "file", 20, name=EVIL)):
            tab.open(link)
            tab.wait(lambda: tab.text("#name") == EVIL)
            assert tab.run("return document.title") == f"{EVIL} - ThinPipe"
            assert EVIL in tab.text("#samples")
            assert EVIL in tab.text("#notes .warning")
            assert tab.run("return document.querySelectorAll('img').length") == 0
            assert tab.complaints() == []
        tab.run("document.body.insertAdjacentHTML('beforeend', arguments[0])", EVIL)  # a mistake
        tab.wait(lambda: any("Content Security Policy" in text for text in tab.complaints()))
        assert tab.run("return document.title") != "pwned"


def test_the_token_is_in_the_link_alone(tab: Browser, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run", records(20)), listen="0.0.0.0") as (port, links):
        token = links[0].partition("#")[2]
        tab.open(f"http://127.0.0.1:{port}/")
        tab.wait(lambda: "with its token" in tab.text("#state"))
        tab.open(f"http://127.0.0.1:{port}/#{token}")
        tab.wait(lambda: "Step 20 of 40" in tab.text("#state"))
        sent = tab.run("return performance.getEntriesByType('resource').map(e => e.name)")
        assert not any(token in address for address in sent)


def test_charts_are_read_and_zoomed_by_keyboard(tab: Browser, tmp_path: Path) -> None:
    open_finished(tab, tmp_path, 200, *DESKTOP)
    said = "#loss output"
    label = tab.run("return document.querySelector(arguments[0]).getAttribute('aria-label')", PLOT)
    assert label.startswith("Loss by step. step 200: ")
    tab.press(PLOT, HOME)
    assert tab.text(said).startswith("step 1: each step ")
    tab.press(PLOT, RIGHT, RIGHT, LEFT)
    assert tab.text(said).startswith("step 2: ")
    tab.press(PLOT, END)
    assert "evaluation, compressed" in tab.text(said)
    scale = "const s = charts.get('loss Loss by step').u.scales.x; return [s.min, s.max]"
    assert tab.run(scale) == [1, 200]
    tab.press(PLOT, "+", "+")
    low, high = tab.run(scale)
    assert high - low == pytest.approx(199 / 4)
    assert high == 200
    tab.run("document.querySelector('#loss [title=earlier]').click()")
    assert tab.run(scale) == pytest.approx([low - (high - low) / 2, high - (high - low) / 2])
    tab.press(PLOT, "0")
    assert tab.run(scale) == [1, 200]


def test_fingers_read_zoom_and_move_charts(tab: Browser, tmp_path: Path) -> None:
    open_finished(tab, tmp_path, 200, *PHONE)
    over, said = "#loss .u-over", "#loss output"
    centre = {"block": "center", "behavior": "instant"}
    tab.run("document.querySelector(arguments[0]).scrollIntoView(arguments[1])", over, centre)

    def scale() -> tuple[float, float]:
        low, high = tab.run(
            "const s = charts.get('loss Loss by step').u.scales.x; return [s.min, s.max]"
        )
        return low, high

    tab.touch(over, (0.3, 0.7))
    tab.wait(lambda: re.match(r"step 1[34]\d: each step ", tab.text(said)))
    assert scale() == (1, 200), "one finger reads"
    tab.touch(over, (0.4, 0.3), (0.6, 0.7))
    tab.wait(lambda: scale() != (1, 200))
    low, high = scale()
    assert high - low == pytest.approx(199 / 2, rel=0.1), "two zoom, twice as far from each other"
    assert (low + high) / 2 == pytest.approx(100.5, abs=5), "around their middle"
    tab.touch(over, (0.7, 0.4))
    tab.wait(lambda: scale() != (low, high))
    assert scale()[0] == pytest.approx(low + 0.3 * (high - low), rel=0.15), "one moves it"
    assert scale()[1] - scale()[0] == pytest.approx(high - low)
    for _ in range(2):
        tab.touch(over, (0.1, 0.45), (0.9, 0.55))
    tab.wait(lambda: scale() == (1, 200))
    for _ in range(6):
        tab.touch(over, (0.45, 0.1), (0.55, 0.9))
    assert scale()[1] - scale()[0] == pytest.approx(2), "no further"
    before = tab.run("return scrollY")
    tab.touch(over, (0.5, 0.5), rise=240)
    tab.wait(lambda: tab.run("return scrollY") > before + 100)  # up or down scrolls the page
    assert tab.complaints() == []


def test_smoothing_says_what_it_is_and_no_colour_is_needed(tab: Browser, tmp_path: Path) -> None:
    open_finished(tab, tmp_path, 200, *DESKTOP)
    legend = "return [...document.querySelectorAll('#loss .legend li')].map(i => i.textContent)"
    assert tab.run(legend) == [
        *("each step", "smoothed: line fitted to \u00b15 steps"),
        *("skipped step", "evaluation, compressed", "evaluation"),
    ]
    looks = """return [...document.querySelectorAll('#edges .legend svg, #bytes .legend svg')]
        .map(s => [s.firstChild.getAttribute('d'), s.firstChild.style.strokeDasharray].join())"""
    assert tab.run(looks) == [",", ",8, 5", ","]
    tab.run("""const s = document.getElementById('smoothing'); s.value = '0';
        s.dispatchEvent(new Event('change'))""")
    tab.wait(lambda: tab.run(legend)[:2] == ["each step", "skipped step"])


def test_runs_lie_over_each_other(tab: Browser, tmp_path: Path) -> None:
    tab.resize(*PHONE)
    folders = [
        write_run(tmp_path / str(n), records(20 + 10 * n, seed=n), name=f"run {n}") for n in (0, 1)
    ]
    with served(*folders) as (port, _):
        tab.open(f"http://localhost:{port}/")
        tab.wait(lambda: visible(tab)[:1] == ["compared"] and "Steps done" in tab.text("#compared"))
        assert tab.text("#compared .legend").count("run 1, ") == 2
        assert tab.text("#name") == "run 0"
        tab.run("document.querySelectorAll('#runs button')[1].click()")
        tab.wait(lambda: tab.text("#name") == "run 1")
        assert tab.run("return document.querySelectorAll('#runs [aria-pressed=true]').length") == 1
        steps = tab.run("return charts.get('loss Loss by step').steps.length")
        assert steps == 30
        assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
        assert tab.axe() == []


def test_a_long_run_is_drawn_smoothly(tab: Browser, tmp_path: Path) -> None:
    open_finished(tab, tmp_path, 20_000, *PHONE)
    took = tab.driver.execute_async_script("""const [done] = arguments;
        const chart = charts.get('loss Loss by step'), begin = performance.now();
        let drawn = 0;
        chart.u.hooks.draw.push(() => { drawn += 1; });
        (async () => {
            for (let i = 0; i < 20; i++) { chart.zoom(i % 2 ? 2 : 0.5); await null; await null; }
            done([drawn, (performance.now() - begin) / 20]);
        })()""")
    assert took[0] == 20, "all are drawn"
    assert took[1] < 100, "ms for one; an idle machine takes two"
    assert "lowest" in tab.text("#loss .legend")


def test_memory_stays_flat_while_a_run_goes_on(tab: Browser, tmp_path: Path) -> None:
    """Of a page that is told of 600 changes, as of ten minutes."""
    open_finished(tab, tmp_path, 400, *DESKTOP)
    (message,) = json.loads(tab.run("return document.getElementById('data').textContent"))
    last = {name: column[-1:] for name, column in message["columns"].items()}

    def heap() -> int:
        tab.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        found = tab.driver.execute_cdp_cmd("Runtime.getHeapUsage", {})
        return int(found["usedSize"])

    def change(times: int) -> None:
        script = """for (let i = 0; i < arguments[2]; i++) {
            arguments[0].cards[0][1] = String(i);
            const parts = structuredClone(arguments[0]);
            apply({ run: 0, start: 399, columns: arguments[1], parts });
            render(); }"""
        tab.run(script, message["parts"], last, times)

    change(100)
    before = heap()
    change(500)
    assert heap() < before + 2_000_000
    assert tab.run("return runs[0].columns.step.length") == 400
    assert HOSTS[0] in tab.text("#places")
