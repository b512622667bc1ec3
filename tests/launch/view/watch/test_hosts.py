"""The page of a run on four emulated hosts, one of which is cut off, and leaves and comes back."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import DESKTOP, browser
from tests.faults.hosts import HostsRun, cut_off
from tests.launch.test_train import RUN
from tests.runs import served
from tests.shaped import shaped
from tests.texts import write_squares
from thinpipe.launch.lab.spec import NetworkSpec

HOSTS, LAST = 4, 3
SETTINGS = ("pipeline.cuts=[1,2,3]", "train.epochs=400", "checkpoint.every_steps=20")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HostsRun]:
    net = shaped(NetworkSpec.of(HOSTS, "100mbit", delay="1ms"))
    text = write_squares(tmp_path / "text.txt")
    config = RUN.format(folder=tmp_path / "one", text=text)
    with net:
        started = HostsRun(
            net, tmp_path, config, *SETTINGS, hosts=HOSTS, options=("--max-restarts", "5")
        )
        yield started
        started.kill()


@pytest.mark.slow
@pytest.mark.dist
def test_the_page_shows_all_hosts_and_what_happens_to_one(run: HostsRun) -> None:
    run.wait_for_step(2)
    with browser() as tab, served(run.run_folder(0)) as (port, _):
        tab.resize(*DESKTOP)
        tab.open(f"http://localhost:{port}/")
        tab.wait(lambda: tab.text("#state").startswith("Live. Step "))

        def states() -> dict[tuple[str, str], str]:
            """What the table says of each connection."""
            rows = """return [...document.querySelectorAll('#edges tbody tr')].map(
                row => [...row.children].map(cell => cell.textContent))"""
            return {(row[0], row[1]): row[8] for row in tab.run(rows) if len(row) > 8}

        def all_up() -> bool:
            found = states()
            up = all(state.startswith("up") for state in found.values())
            return up and len(found) == HOSTS * (HOSTS - 1)

        def resumed() -> int:
            cells = "return [...document.querySelectorAll('#edges tbody td:nth-child(7)')]"
            return sum(map(int, tab.run(f"{cells}.map(cell => cell.textContent)")))

        tab.wait(all_up)
        assert "host3, rank 3 (" not in tab.text("#places"), "no host is marked"
        assert resumed() == 0

        cut_off(run, LAST, cut=True)
        tab.wait(lambda: states().get(("host0", "host3"), "").startswith(("silent", "lost")))
        assert "host3, rank 3 (" in tab.text("#places")
        tab.wait(lambda: states().get(("host3", "host0"), "").startswith("no news for"))
        assert states()["host0", "host1"].startswith("up")
        cut_off(run, LAST, cut=False)
        tab.wait(all_up)
        tab.wait(lambda: resumed() >= 2)
        assert "host3, rank 3 (" not in tab.text("#places")
        step = tab.run("return runs[0].columns.step.at(-1)")
        tab.wait(lambda: tab.run("return runs[0].columns.step.at(-1)") > step)

        os.kill(run.pids[LAST], signal.SIGKILL)
        os.waitpid(run.pids.pop(LAST), 0)
        tab.wait(lambda: "Ended after step" in tab.text("#state"))
        run.start(LAST)
        tab.wait(lambda: tab.text("#state").startswith("Live. Step "))
        tab.wait(lambda: "restarting, 1 of 5: " in tab.text("#notes"))
        tab.wait(all_up)
        assert tab.complaints() == []
