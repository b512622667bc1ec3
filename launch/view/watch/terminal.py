"""The page's numbers in a terminal, from a folder or from the link of another machine's page."""

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import urldefrag, urljoin

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinpipe.launch.view.terminal.grids import labelled
from thinpipe.launch.view.terminal.progress import Sparkline
from thinpipe.launch.view.watch.follow import Followed

_PERIOD_S = 1.0  # as the page (`PERIOD_S` in server.py)
_WAIT_S = 30.0  # three signs of life of the server (`_ALIVE_S` there)
_NOTES = 4  # the last ones: the frame must fit a terminal
_CELLS = 60  # with its label in 80 columns
_LEFT_OUT = "Messages"


def show(runs: list[str]) -> None:
    """Draw one run until it is finished, or until Ctrl-C; not on a terminal, draw it once.

    Raises:
        ValueError: they are several, no run's, or a link that shows nothing.
    """
    if len(runs) > 1:
        raise ValueError(f"--terminal: shows one run, and {len(runs)} were named; name one")
    console = Console(highlight=False)
    states = _states(runs[0])
    if not console.is_terminal:
        console.print(frame(next(states)))
        return
    with Live(console=console, auto_refresh=False) as live:
        for state in states:
            live.update(frame(state), refresh=True)
            if state["parts"]["head"]["over"]:
                return


def frame(state: dict[str, Any]) -> RenderableType:
    """What is known of a run, as wide as the terminal."""
    parts, head = state["parts"], state["parts"]["head"]
    spark = Sparkline(_CELLS)
    for loss in state["columns"]["loss"]:
        spark.add(math.nan if loss is None else loss)
    bar = Table.grid(expand=True)
    bar.add_row(ProgressBar(total=head["total"], completed=head["done"]))
    words = [*filter(None, [state["problem"]]), head["state"] or "Finished."]
    words += [f"About {head['left']} left."] if head["left"] and not state["silence"] else []
    words += filter(None, [state["silence"]])
    body: list[RenderableType] = [
        Text(head["about"], style="dim"),
        Text(" ".join(words)),
        bar,
        labelled([tuple(card) for card in parts["cards"]], columns=2),
        Text.assemble(("loss so far ", "dim"), (str(spark), "cyan")),
    ]
    body += [_table(table) for table in parts["tables"] if table["place"] != "error"]
    for note in parts["notes"][-_NOTES:]:
        style = "bold" if note["kind"] == "warning" else "dim"
        body.append(Text(f"step {note['step']:,}: {note['text']}", style=style))
    title = Text.assemble(("ThinPipe ", "bold cyan"), (head["name"], "bold"))
    return Panel(Group(*body), title=title, title_align="left", box=box.ROUNDED)


def _table(spec: dict[str, Any]) -> Table:
    table = Table(box=None, title=spec["title"], title_justify="left", pad_edge=False,
                  padding=(0, 1, 0, 0), header_style="dim", title_style="bold")  # fmt: skip
    kept = [number for number, name in enumerate(spec["heads"]) if name != _LEFT_OUT]
    for number in kept:
        justify: Any = "left" if number < spec["texts"] else "right"
        table.add_column(
            Text(spec["heads"][number]), justify=justify, overflow="fold", vertical="bottom"
        )
    for row in [*spec["rows"], *([spec["total"]] if "total" in spec else [])]:
        cells = [cell if isinstance(cell, str) else cell[0] for cell in row]
        table.add_row(*(Text(cells[number]) for number in kept))
    return table


def _states(run: str) -> Iterator[dict[str, Any]]:
    state: dict[str, Any] = {"parts": {}, "columns": {}, "silence": "", "problem": ""}
    messages = _of_link(run) if run.startswith(("http://", "https://")) else _of_folder(Path(run))
    for message in messages:
        state["problem"] = _printable(message.get("problem", state["problem"]))
        if message.get("run") != 0:
            continue
        start, columns = message.get("start", 0), message.get("columns", {})
        for name, values in columns.items():
            kept = state["columns"].get(name, [])[:start]
            state["columns"][name] = [*kept, *[None] * (start - len(kept)), *values]
        state["parts"] |= _printable(message["parts"])
        state["silence"] = _printable(message.get("silence", state["silence"]))
        yield state


def _printable(value: Any) -> Any:
    """Without characters that a terminal would obey: texts are of other people."""
    if isinstance(value, str):
        return "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value
        )
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return value


def _of_folder(folder: Path) -> Iterator[dict[str, Any]]:
    run, before = Followed(folder), None
    if run.moment is None:
        raise ValueError(f"{folder}: no step was recorded yet; wait for the first one")
    while True:
        now, news = run.moment, {"run": 0, "parts": {}}
        if now is not before and now is not None:
            news, before = json.loads(now.since(0, before)), now
        yield news | {"silence": run.silence, "problem": run.problem}
        sleep(_PERIOD_S)
        run.refresh()


def _of_link(link: str) -> Iterator[dict[str, Any]]:
    """Messages of a page's server."""
    address, token = urldefrag(link)
    request = urllib.request.Request(urljoin(address, "events"))
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        opener = urllib.request.build_opener(_NotElsewhere)
        with opener.open(request, timeout=_WAIT_S) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        words = error.read(200).decode("utf-8", "replace").strip()
        if place := error.headers.get("Location"):
            words = f"it leads to {place}; name the page's own link, as only it gets the token"
        raise ValueError(_printable(f"{address}: {error.code}, {words}")) from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise ValueError(f"{address}: {why}; is the run's page still served there?") from None
    raise ValueError(
        f"{address}: its server has ended, with its run or without; look where it was started"
    )


class _NotElsewhere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token of a link is for its server alone."""

    def redirect_request(self, *_: object) -> None:
        return None
