"""The live panel of a run on a terminal, redrawn in place.

Where the terminal is too small for all of it, the same numbers stand closer together
(`launch/display/brief.py`): with 8 stages they fit into 80 columns and 24 lines.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from thinpipe.launch.display.brief import brief_numbers, brief_traffic
from thinpipe.launch.display.connections import (
    Connection,
    Connections,
    brief_connections,
    connection_table,
    in_use,
)
from thinpipe.launch.display.grids import between_shards, labelled, shape_of, traffic_table
from thinpipe.launch.display.progress import LOSS_STEPS, RunningValues
from thinpipe.launch.report.metrics import RunInfo, StepRecord
from thinpipe.launch.words import (
    NOTHING,
    format_bytes,
    format_duration,
    format_loss,
    format_ratio,
    format_share,
    format_speed,
    other_scores,
)

_LEAST = 8
"""As many connections, or all of fewer, are shown before cuts are left out."""


class LivePanel:
    """Progress, metrics, the traffic of every cut, and of every connection between machines."""

    def __init__(
        self,
        info: RunInfo,
        console: Console,
        progress: RunningValues,
        connections: Connections | None = None,
        *,
        done: int = 0,
    ) -> None:
        self._info, self._console, self._done = info, console, done
        self._progress, self._connections = progress, connections
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
        """Draw it from here on."""
        self._live.start(refresh=True)

    def step(self, record: StepRecord) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=record.step)

    def evaluated(self, record: StepRecord) -> None:
        """Nothing to do: the panel is drawn again all the time."""

    def stop(self, *, clear: bool) -> None:
        """Draw it no more; leave it where it is, or `clear` it."""
        if self._live.is_started:
            self._live.transient = clear
            self._live.stop()

    def frame(self) -> RenderableType:
        """What is drawn now: whatever of the run fits the terminal.

        Below it stays a line, if there is one, for the ^C of a terminal, which shifts the panel.
        """
        panel = self._fitting()
        room = self._height(panel) < self._console.height
        return Group(panel, "") if room else panel

    def _fitting(self) -> Panel:
        now = self._connections.now() if self._connections is not None else []
        whole = self._whole(now)
        if self._height(whole) <= self._console.height:
            return whole
        cuts, most = len(self._info.cuts), len(now)
        brief = self._brief(cuts, now, most)
        while (too_much := self._height(brief) - self._console.height) > 0 and most > _LEAST:
            most = max(_LEAST, min(most, len(in_use(now)[0])) - 2 * too_much)
            brief = self._brief(cuts, now, most)
        if too_much <= 0 or self._progress.record is None:
            return brief
        return self._brief(  # and a line that says how many are left out
            max(0, cuts - too_much - 1), now, most
        )

    def _whole(self, now: Sequence[Connection]) -> Panel:
        record = self._progress.record
        parts: list[RenderableType] = [Text(shape_of(self._info), style="dim"), "", self._bar, ""]
        if record is None:
            parts.append(self._waiting())
        else:
            spark = Text.assemble(("loss so far  ", "dim"), (str(self._progress.spark), "cyan"))
            parts += [_numbers(self._info, record, self._progress), "", spark, ""]
            parts.append(_traffic(self._info, record))
        if now:
            parts += ["", connection_table(now)]
        return self._boxed(parts)

    def _brief(self, cuts: int, now: Sequence[Connection], most: int) -> Panel:
        record = self._progress.record
        parts: list[RenderableType] = [Text(shape_of(self._info), style="dim"), self._bar]
        if record is None:
            parts.append(self._waiting())
        else:
            parts.append(brief_numbers(self._info, record, self._progress))
            parts.append(brief_traffic(self._info, record, cuts))
        if now:
            parts.append(brief_connections(now, most))
        panel = self._boxed(parts)
        if record is not None:
            spark = (str(self._progress.spark), "cyan")
            panel.subtitle = Text.assemble(("loss so far ", "dim"), spark)
            panel.subtitle_align = "left"
        return panel

    def _waiting(self) -> Text:
        resumed = f"resumed from step {self._done}: " if self._done else ""
        which = "next" if self._done else "first"
        return Text(f"{resumed}waiting for the {which} step to finish", style="dim")

    def _boxed(self, parts: list[RenderableType]) -> Panel:
        title = Text.assemble(("ThinPipe ", "bold cyan"), (self._info.name, "bold"))
        if self._connections is not None and self._connections.host:
            title.append(f" on {self._connections.host}")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim",
                     box=box.ROUNDED, padding=(0, 1))  # fmt: skip

    def _height(self, panel: Panel) -> int:
        return len(self._console.render_lines(panel, pad=False))


def _numbers(info: RunInfo, record: StepRecord, progress: RunningValues) -> RenderableType:
    evaluation = progress.eval or {}
    grad_norm = NOTHING if record.grad_norm is None else f"{record.grad_norm:.3g}"
    cells = [
        ("loss, this step", format_loss(record.loss)),
        (f"mean of last {LOSS_STEPS}", format_loss(progress.mean_loss)),
        ("eval loss", format_loss(evaluation.get("loss"))),
        ("eval compressed", format_loss(evaluation.get("loss_compressed"))),
        (f"{info.unit}s/s", format_speed(record.tokens_per_s)),
        ("bubble", f"{record.bubble:.1%}"),
        ("epoch", str(record.epoch)),
        ("step time", format_duration(record.step_s)),
        ("grad norm", grad_norm),
        ("learning rate", f"{record.lr:.2e}"),
        ("skipped steps", str(progress.skipped)),
        ("activations", format_bytes(record.sent("forward"))),
        ("activation grads", format_bytes(record.sent("backward"))),
        ("replica sync", format_bytes(record.sync_bytes)),
        ("control", format_bytes(record.control_bytes)),
        *between_shards(record.weight_bytes, record.gradient_bytes),
        *((f"eval {name}", value) for name, value in other_scores(evaluation)),
    ]
    return labelled(cells)


def _traffic(info: RunInfo, record: StepRecord) -> RenderableType:
    if not info.cuts:
        return Text("one stage, so no cuts", style="dim")
    total = sum(count.nbytes for count in record.wire)
    table = traffic_table()
    table.add_column("Mbit/s now", justify="right", no_wrap=True, footer=record.mbps(total))
    table.add_column("per step", justify="right", no_wrap=True, footer=format_bytes(total))
    table.add_column("vs bf16", justify="right", no_wrap=True)
    table.add_column("vs fp32", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    sent = {(count.cut, count.direction): count for count in record.wire}
    for key in info.wire_keys():
        nbytes = sent[key].nbytes if key in sent else 0
        values = sent[key].values if key in sent else 0
        table.add_row(
            str(key[0]),
            key[1],
            info.method(key),
            record.mbps(nbytes),
            format_bytes(nbytes),
            format_ratio(2 * values / nbytes if nbytes else None),
            format_ratio(4 * values / nbytes if nbytes else None),
            format_share(sent[key].error if key in sent else None),
        )
    return table
