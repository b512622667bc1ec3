"""Console output of a run: live progress, then the final tables.

On a terminal: a panel, redrawn in place. Otherwise: a plain line every few seconds, without control
characters. Both fit into 80 columns.
"""

from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console

from thinpipe.launch.host.words import format_repaired
from thinpipe.launch.view.report.edge_trace import EdgeTrace
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import Summary
from thinpipe.launch.view.terminal.final import Left, final_tables
from thinpipe.launch.view.terminal.log import Log, print_line
from thinpipe.launch.view.terminal.panel import LivePanel
from thinpipe.launch.view.terminal.progress import RunningValues


class Display:
    """Shows a run: a live panel when `interactive`, plain lines otherwise.

    Use it as a context manager around the training loop. `console` is where it writes, by default
    standard output. Without `info` it shows nothing. `trace` has the connections to other
    machines; `done` steps are of a checkpoint.
    """

    def __init__(
        self,
        info: RunInfo | None,
        trace: EdgeTrace | None = None,
        *,
        interactive: bool = False,
        console: Console | None = None,
        done: int = 0,
    ) -> None:
        self._info = info
        quiet = Console(quiet=True) if info is None else None
        self._console = quiet or console or _console(interactive)
        self._progress = RunningValues()
        self._view: LivePanel | Log | None = None
        self.keep: Callable[[str], None] | None = None
        """Where messages go as well."""
        if info is not None:
            self._view = (
                LivePanel(info, self._console, self._progress, trace, done=done)
                if interactive
                else Log(info, self._console, trace)
            )

    def step(self, record: StepRecord) -> None:
        self._progress.update(record)
        if self._view is not None:
            self._view.step(record)
        if record.repaired:
            self.note_repaired(record.repaired)
        if record.eval is not None:
            self.evaluated(record)

    def planned(self, steps: int) -> None:
        if self._view is not None:
            self._view.planned(steps)

    def evaluated(self, record: StepRecord) -> None:
        self._progress.eval = record.eval
        if self._view is not None:
            self._view.evaluated(record)

    def note(self, text: str) -> None:
        print_line(self._console, text)
        if self.keep is not None and text:
            self.keep(text)

    def note_repaired(self, repaired: Mapping[int, int]) -> None:
        which = format_repaired(repaired)
        self.note(f"cached activations of the two ends differed and were reset: {which}")

    def finish(self, summary: Summary, left: Left | None) -> None:
        """Replace the live panel by the final tables; what is `left` is named if it is here."""
        if self._view is not None and self._info is not None:
            self._view.stop(clear=True)
            self._console.print(final_tables(self._info, summary, left))

    def __enter__(self) -> Self:
        if self._view is not None:
            self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.stop(clear=False)


def _console(interactive: bool) -> Console:
    if interactive:
        return Console(highlight=False)
    return Console(
        force_terminal=False, force_interactive=False, color_system=None, highlight=False
    )
