"""Console output of a run: live progress, then the final tables.

On a terminal: a panel, redrawn in place. Otherwise: a plain line every few seconds, without control
characters. Both fit into 80 columns.
"""

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from thinpipe.launch.report.edge_trace import EdgeTrace, edge_panel
from thinpipe.launch.report.edges import edge_table
from thinpipe.launch.report.metrics import (
    NOTHING,
    RecentMean,
    RunInfo,
    StepRecord,
    format_bytes,
    format_duration,
    format_loss,
    format_rate,
    format_ratio,
    format_repaired,
    format_share,
    other_scores,
)
from thinpipe.launch.report.summary import Summary, direction_bytes, traffic_cells
from thinpipe.pipeline.wire.header import Direction

LOG_INTERVAL_S = 5.0
LOSS_STEPS = 10

_SPARK_CELLS = 60
_SPARK = "▁▂▃▄▅▆▇█"
_WIDE_METHOD = 16
_SHORT = {"token": "tok", "sample": "smp"}


class Display:
    """Shows a run: a live panel when `interactive`, plain lines otherwise.

    Use it as a context manager around the training loop. `console` is where it writes, by default
    standard output. Without `info` it shows nothing. `trace` has this host's connections.
    """

    def __init__(
        self,
        info: RunInfo | None,
        trace: EdgeTrace | None = None,
        *,
        interactive: bool = False,
        console: Console | None = None,
    ) -> None:
        self._info = info
        quiet = Console(quiet=True) if info is None else None
        self._console = quiet or console or _console(interactive)
        self._progress = _Progress()
        self._view: _Panel | _Log | None = None
        if info is not None:
            self._view = (
                _Panel(info, self._console, self._progress, trace)
                if interactive
                else _Log(info, self._console, self._progress)
            )

    def step(self, record: StepRecord) -> None:
        """Take in a finished step."""
        self._progress.update(record)
        if self._view is not None:
            self._view.step(record)
        if record.repaired:
            self.note_repaired(record.repaired)
        if record.eval is not None:
            self.evaluated(record)

    def evaluated(self, record: StepRecord) -> None:
        """Take in the evaluation after a step."""
        self._progress.eval = record.eval
        if self._view is not None:
            self._view.evaluated(record)

    def note(self, text: str) -> None:
        """Print a line that stays, such as "checkpoint saved"."""
        _print(self._console, text)

    def note_repaired(self, repaired: Mapping[int, int]) -> None:
        """Print which AQ-SGD memories were reset."""
        self.note(f"memories of the two ends differed and were reset: {format_repaired(repaired)}")

    def finish(self, summary: Summary, *, written: bool = True) -> None:
        """Replace the live panel by the final tables; the report is named if it is here."""
        if self._view is not None and self._info is not None:
            self._view.stop(clear=True)
            self._console.print(_final(self._info, summary, written=written))

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


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Progress:
    """Running values over the steps so far."""

    def __init__(self) -> None:
        self.record: StepRecord | None = None
        self.mean_loss = float("nan")
        self.eval: Mapping[str, float] | None = None
        self.skipped = 0
        self.spark = Sparkline(_SPARK_CELLS)
        self._mean = RecentMean(LOSS_STEPS)

    def update(self, record: StepRecord) -> None:
        self.mean_loss = self._mean.update(record.loss)
        self.spark.add(self.mean_loss)
        self.skipped += record.skipped
        self.record = record


class Sparkline:
    """A curve of any length in fewer than `cells` (an even number) characters.

    When the cells are full, neighbours are merged, and from then on each holds twice the values.
    """

    def __init__(self, cells: int) -> None:
        self._limit = cells
        self._per_cell = 1
        self._means: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Append a value; NaN is left out."""
        if value != value:
            return
        self._open.append(value)
        if len(self._open) == self._per_cell:
            self._means.append(sum(self._open) / self._per_cell)
            self._open = []
        if len(self._means) == self._limit:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(a + b) / 2 for a, b in pairs]
            self._per_cell *= 2

    def __str__(self) -> str:
        means = list(self._means)
        if not means:
            return ""
        low, high = min(means), max(means)
        scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARK[round((mean - low) * scale)] for mean in means)


class _Log:
    """Plain lines: the first and the last step, evaluations, and one every few seconds."""

    def __init__(self, info: RunInfo, console: Console, progress: _Progress) -> None:
        self._info = info
        self._console = console
        self._progress = progress
        self._first: tuple[int, float] | None = None
        self._printed_s, self._printed_step = -LOG_INTERVAL_S, 0

    def start(self) -> None:
        _print(self._console, f"ThinPipe {self._info.name}\n{_shape(self._info)}")

    def step(self, record: StepRecord) -> None:
        now_s = time.monotonic()
        self._first = self._first or (record.step, now_s)
        due = now_s - self._printed_s >= LOG_INTERVAL_S
        if due or record.step == self._info.total_steps:
            self._print_step(record, now_s)

    def evaluated(self, record: StepRecord) -> None:
        if record.step != self._printed_step:
            self._print_step(record, time.monotonic())
        for line in _evaluation(record.eval or {}):
            _print(self._console, f"  evaluation: {line}")

    def stop(self, *, clear: bool) -> None:
        """Nothing to do: lines are printed whole."""

    def _print_step(self, record: StepRecord, now_s: float) -> None:
        self._printed_s, self._printed_step = now_s, record.step
        _print(self._console, self._line(record, now_s))

    def _line(self, record: StepRecord, now_s: float) -> str:
        total = self._info.total_steps
        parts = [
            f"step {record.step:>{len(str(total))}}/{total}",
            f"epoch {record.epoch}",
            f"loss {format_loss(record.loss)}",
            f"{format_rate(record.tokens_per_s)} {_SHORT[self._info.unit]}/s",
        ]
        if record.wire:
            parts.append(f"{format_bytes(sum(count.nbytes for count in record.wire))}/step")
        if record.skipped:
            parts.append("skipped")
        assert self._first is not None
        done, began_s = record.step - self._first[0], self._first[1]
        if done and record.step < total:
            parts.append(f"{_about((now_s - began_s) / done * (total - record.step))} left")
        return "  ".join(parts)


def _about(duration_s: float) -> str:
    """A rough duration, in a single unit."""
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if duration_s >= unit_s:
            return f"{duration_s / unit_s:.2g} {unit}"
    return f"{duration_s:.0f} s"


class _Panel:
    """The live panel: progress, metrics, the traffic of every cut, and of every connection."""

    def __init__(
        self, info: RunInfo, console: Console, progress: _Progress, trace: EdgeTrace | None
    ) -> None:
        self._info = info
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
        self._task = self._bar.add_task("", total=info.total_steps)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def start(self) -> None:
        self._live.start(refresh=True)

    def step(self, record: StepRecord) -> None:
        self._bar.update(self._task, completed=record.step)

    def evaluated(self, record: StepRecord) -> None:
        """Nothing to do: the panel is drawn again all the time."""

    def stop(self, *, clear: bool) -> None:
        if self._live.is_started:
            self._live.transient = clear
            self._live.stop()

    def _render(self) -> RenderableType:
        record = self._progress.record
        parts: list[RenderableType] = [Text(_shape(self._info), style="dim"), "", self._bar]
        if record is None:
            parts += ["", Text("waiting for the first step to finish", style="dim")]
        else:
            parts += ["", _numbers(self._info, record, progress=self._progress)]
            parts += ["", _traffic(self._info, record)]
        if self._trace is not None and self._trace.now:
            parts += ["", edge_panel(self._trace)]
        title = Text.assemble(("ThinPipe ", "bold cyan"), (self._info.name, "bold"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim",
                     box=box.ROUNDED, padding=(0, 1))  # fmt: skip


def _shape(info: RunInfo) -> str:
    """The run in a line, or in two that fit the panel: size, stages, schedule."""
    parts = (
        info.size,
        _plural(info.stages, "stage"),
        _plural(info.replicas, "replica"),
        *([_plural(info.shards, "shard")] if info.shards > 1 else []),
        info.schedule,
        _plural(info.microbatches, "microbatch", "microbatches"),
    )
    return textwrap.fill(", ".join(parts), width=76)


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _evaluation(losses: Mapping[str, float]) -> list[str]:
    text = f"loss {format_loss(losses.get('loss'))}"
    if "loss_compressed" in losses:
        text += f", with compressed boundaries {format_loss(losses['loss_compressed'])}"
    scores = {name: value for name, value in losses.items() if not name.endswith("_compressed")}
    others = ", ".join(f"{name} {value}" for name, value in other_scores(scores))
    return [text, others] if others else [text]


def _numbers(info: RunInfo, record: StepRecord, *, progress: _Progress) -> Group:
    evaluation = progress.eval or {}
    grad_norm = NOTHING if record.grad_norm is None else f"{record.grad_norm:.3g}"
    cells = [
        ("loss, this step", format_loss(record.loss)),
        (f"mean of last {LOSS_STEPS}", format_loss(progress.mean_loss)),
        ("eval loss", format_loss(evaluation.get("loss"))),
        ("eval compressed", format_loss(evaluation.get("loss_compressed"))),
        (f"{info.unit}s/s", format_rate(record.tokens_per_s)),
        ("bubble", f"{record.bubble:.1%}"),
        ("epoch", str(record.epoch)),
        ("step time", format_duration(record.step_s)),
        ("grad norm", grad_norm),
        ("learning rate", f"{record.lr:.2e}"),
        ("skipped steps", str(progress.skipped)),
        ("activations", format_bytes(_sent(record, "forward"))),
        ("activation grads", format_bytes(_sent(record, "backward"))),
        ("replica sync", format_bytes(record.sync_bytes)),
        ("control", format_bytes(record.control_bytes)),
        *_between_shards(record.weight_bytes, record.gradient_bytes),
        *((f"eval {name}", value) for name, value in other_scores(evaluation)),
    ]
    spark = Text.assemble(("loss so far  ", "dim"), (str(progress.spark), "cyan"))
    return Group(_cells(cells), "", spark)


def _between_shards(weights: int, gradients: int) -> list[tuple[str, str]]:
    if not weights and not gradients:
        return []
    return [("weights", format_bytes(weights)), ("weight gradients", format_bytes(gradients))]


def _cells(cells: Sequence[tuple[str, str]], columns: int = 4) -> Table:
    """Lay out (label, value) pairs in equal columns, the label above its value."""
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    for start in range(0, len(cells), columns):
        row = cells[start : start + columns]
        grid.add_row(*(Text(label, style="dim") for label, _ in row))
        grid.add_row(*(Text(value, style="bold") for _, value in row))
    return grid


def _traffic_table() -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0, expand=True,
                  header_style="dim", footer_style="bold", show_footer=True)  # fmt: skip
    table.add_column("cut", footer="all")
    table.add_column("direction", no_wrap=True)
    table.add_column("method", overflow="fold", max_width=_WIDE_METHOD)
    return table


def _traffic(info: RunInfo, record: StepRecord) -> RenderableType:
    if not info.cuts:
        return Text("one stage, so no cuts", style="dim")
    total = sum(count.nbytes for count in record.wire)
    table = _traffic_table()
    table.add_column("Mbit/s now", justify="right", no_wrap=True, footer=_mbps(total, record))
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
            _mbps(nbytes, record),
            format_bytes(nbytes),
            format_ratio(2 * values / nbytes if nbytes else None),
            format_ratio(4 * values / nbytes if nbytes else None),
            format_share(sent[key].error if key in sent else None),
        )
    return table


def _sent(record: StepRecord, direction: Direction) -> int:
    return sum(count.nbytes for count in record.wire if count.direction == direction)


def _mbps(nbytes: int, record: StepRecord) -> str:
    return f"{nbytes * 8 / record.step_s / 1e6:,.1f}" if record.step_s > 0 else NOTHING


def _final(info: RunInfo, summary: Summary, *, written: bool) -> RenderableType:
    losses = summary["eval"] or {}
    cells = [
        ("loss, mean of last epoch", format_loss(summary["final_loss"])),
        ("eval loss", format_loss(losses.get("loss"))),
        ("eval loss, compressed", format_loss(losses.get("loss_compressed"))),
        (f"median {info.unit}s/s", format_rate(summary["median_tokens_per_s"])),
        ("time in steps", format_duration(summary["wall_s"])),
        ("mean bubble", f"{summary['mean_bubble']:.1%}"),
        ("steps", f"{summary['steps']:,} ({summary['skipped']:,} skipped)"),
        ("activations", format_bytes(direction_bytes(summary, "forward"))),
        ("activation gradients", format_bytes(direction_bytes(summary, "backward"))),
        ("between replicas", format_bytes(summary["sync_bytes"])),
        ("ratio to fp32", format_ratio(summary["sync_ratio_fp32"])),
        ("control messages", format_bytes(summary["control_bytes"])),
        *_between_shards(summary["weight_bytes"], summary["gradient_bytes"]),
        *((f"eval {name}", value) for name, value in other_scores(losses)),
    ]
    if summary["repaired"]:
        cells.append(("memories reset", f"{sum(summary['repaired'].values()):,} samples"))
    title = Text.assemble(("Finished ", "bold green"), (info.name, "bold"))
    parts: list[RenderableType] = ["", title, "", _cells(cells, columns=3), ""]
    if summary["wire"]:
        parts += [_final_traffic(summary), ""]
        note = "sent: bytes on the wire with headers; bf16, fp32: the same values uncompressed"
        parts += [Text(note, style="dim"), ""]
    if summary["edges"]:
        parts += [edge_table(summary["edges"]), ""]
    if written:
        page = str(info.folder / "report.html")
        parts.append(Text.assemble(("report  ", "dim"), page, overflow="fold"))
    return Group(*parts)


def _final_traffic(summary: Summary) -> Table:
    table = _traffic_table()
    headers = ("messages", "sent", "bf16", "ratio", "fp32", "ratio")
    for header, footer in zip(headers, traffic_cells(summary["totals"]), strict=True):
        table.add_column(header, justify="right", no_wrap=True, footer=footer)
    for row in summary["wire"]:
        table.add_row(str(row["cut"]), row["direction"], row["method"], *traffic_cells(row))
    return table
