"""The live panel of a run on a terminal, redrawn in place.

With 8 stages it fits into 80 columns and 24 lines. Narrower terminals show fewer columns of the
traffic, lower ones fewer connections, then fewer cuts.
"""

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from thinpipe.launch.host.words import format_loss
from thinpipe.launch.view.report.edge_trace import EdgeNow, EdgeTrace
from thinpipe.launch.view.report.metric_table import LOSSES, SHARDS, SPEED, other_scores, shown
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.terminal.connections import connection_grid
from thinpipe.launch.view.terminal.grids import labelled, shape_of
from thinpipe.launch.view.terminal.progress import LOSS_STEPS, RunningValues
from thinpipe.launch.view.terminal.traffic import step_traffic

_LEAST = 8  # this many connections (or all, if fewer) are shown before cuts are left out
_KEYS = (
    *(*SPEED, "train/epoch", "speed/step_s"),
    *LOSSES,
    *("train/grad_norm", "train/lr", "bytes/replicas"),
    *("activations", "gradients", "bytes/control"),
)
"""In rows of four, wide numbers below each other: so all fit into 80 columns."""


class LivePanel:
    """Progress, metrics, the traffic of every cut, and of every connection between machines."""

    def __init__(
        self,
        info: RunInfo,
        console: Console,
        progress: RunningValues,
        trace: EdgeTrace | None = None,
        *,
        done: int = 0,
    ) -> None:
        self._info, self._console, self._done = info, console, done
        self._progress, self._trace = progress, trace
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            TextColumn("elapsed,", style="dim"),
            TimeRemainingColumn(),
            TextColumn("left", style="dim"),
            console=console,
            expand=True,
            speed_estimate_period=600.0,
        )
        self._task = self._bar.add_task("", total=info.total_steps, completed=done)
        self._live = Live(console=console, get_renderable=self.frame, refresh_per_second=4)

    def start(self) -> None:
        self._live.start(refresh=True)

    def step(self, record: StepRecord) -> None:
        self._bar.update(self._task, completed=record.step)

    def planned(self, steps: int) -> None:
        self._bar.update(self._task, total=steps)

    def evaluated(self, record: StepRecord) -> None:
        """Nothing to do: the panel is drawn again all the time."""

    def stop(self, *, clear: bool) -> None:
        """Draw it no more; leave it where it is, or `clear` it."""
        if self._live.is_started:
            self._live.transient = clear
            self._live.stop()

    def frame(self) -> RenderableType:
        """The panel now: whatever of the run fits the terminal.

        Below it stays a line, if there is one, for the ^C of a terminal, which shifts the panel.
        """
        panel = self._fitting()
        return Group(panel, "") if self._missing(panel) < 0 else panel

    def _fitting(self) -> Panel:
        edges = self._trace.edges() if self._trace is not None else []
        cuts, most = len(self._info.cuts), len(edges)
        while (over := self._missing(panel := self._drawn(cuts, edges, most))) > 0:
            if most > _LEAST:
                most = max(_LEAST, most - 2 * over)
            elif cuts and self._progress.record is not None:
                cuts = max(0, cuts - over)
            else:
                break
        return panel

    def _drawn(self, cuts: int, edges: Sequence[EdgeNow], most: int) -> Panel:
        record, host = self._progress.record, self._trace.host if self._trace is not None else ""
        parts: list[RenderableType] = [Text(shape_of(self._info), style="dim"), self._bar]
        if record is None:
            parts.append(self._waiting())
        else:
            parts.append(_numbers(self._info, record, self._progress))
            parts.append(step_traffic(self._info, record, cuts, width=self._console.width))
        if edges:
            parts.append(connection_grid(host, edges, most))
        title = Text.assemble(("ThinPipe ", "bold cyan"), (self._info.name, "bold"))
        title.append(f" on {host}" * bool(host))
        spark = Text.assemble(("loss so far ", "dim"), (str(self._progress.spark), "cyan"))
        return Panel(Group(*parts), title=title, title_align="left", subtitle_align="left",
                     subtitle=None if record is None else spark, border_style="dim",
                     box=box.ROUNDED, padding=(0, 1))  # fmt: skip

    def _waiting(self) -> Text:
        resumed = f"resumed from step {self._done}: " if self._done else ""
        which = "next" if self._done else "first"
        return Text(f"{resumed}waiting for the {which} step to finish", style="dim")

    def _missing(self, panel: Panel) -> int:
        return len(self._console.render_lines(panel, pad=False)) - self._console.height


def _numbers(info: RunInfo, record: StepRecord, progress: RunningValues) -> Table:
    keys = (*_KEYS, *(SHARDS if info.shards > 1 else ()))
    cells = shown(keys, replace(record, eval=progress.eval), unit=info.unit)
    cells.insert(5, (f"mean of {LOSS_STEPS}", format_loss(progress.mean_loss)))
    cells.insert(10, ("skipped", str(progress.skipped)))
    cells += [(f"eval {name}", value) for name, value in other_scores(progress.eval or {})]
    return labelled(cells, columns=4)
