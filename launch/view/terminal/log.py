"""A run as plain lines, for files and pipes."""

import time
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console

from thinpipe.launch.host.words import format_loss
from thinpipe.launch.view.report.edge_trace import EdgeTrace
from thinpipe.launch.view.report.metric_table import METRICS, other_scores
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.terminal.connections import ConnectionLines
from thinpipe.launch.view.terminal.grids import shape_of

LOG_INTERVAL_S = 5.0  # these lines stay, unlike a live panel
CONNECTIONS_INTERVAL_S = 30.0  # several lines each time

_SHORT = {"token": "tok", "sample": "smp"}
_LINE = ("train/epoch", "train/loss", "speed/tokens_per_s", "sent")


def print_line(console: Console, text: str) -> None:
    """Print text as it is, however long; on a terminal in lines of whole words."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


class Log:
    """Plain lines: the first and the last step, evaluations, and one every few seconds.

    Less often, what the connections between machines do, if there are several.
    """

    def __init__(self, info: RunInfo, console: Console, trace: EdgeTrace | None = None) -> None:
        self._info, self._console = info, console
        self._trace, self._lines = trace, ConnectionLines()
        self._first: tuple[int, float] | None = None
        self._printed_s, self._printed_step = -LOG_INTERVAL_S, 0

    def start(self) -> None:
        print_line(self._console, f"ThinPipe {self._info.name}\n{shape_of(self._info)}")

    def step(self, record: StepRecord) -> None:
        now_s = time.monotonic()
        self._first = self._first or (record.step, now_s)
        due = now_s - self._printed_s >= LOG_INTERVAL_S
        if due or record.step == self._info.total_steps:
            self._print_step(record, now_s)

    def planned(self, steps: int) -> None:
        self._info = replace(self._info, total_steps=steps)

    def evaluated(self, record: StepRecord) -> None:
        if record.step != self._printed_step:
            self._print_step(record, time.monotonic())
        for line in _evaluation(record.eval or {}):
            print_line(self._console, f"  evaluation: {line}")

    def stop(self, *, clear: bool) -> None:
        """Nothing to do: lines are printed whole."""

    def _print_step(self, record: StepRecord, now_s: float) -> None:
        self._printed_s, self._printed_step = now_s, record.step
        print_line(self._console, self._line(record, now_s))
        if self._trace is None or self._lines.age_s < CONNECTIONS_INTERVAL_S:
            return
        if now := self._trace.edges():
            print_line(self._console, self._lines.tell(self._trace.host, now))

    def _line(self, record: StepRecord, now_s: float) -> str:
        total = self._info.total_steps
        texts = {key: METRICS[key].text(record) for key in _LINE}
        parts = [
            f"step {record.step:>{len(str(total))}}/{total}",
            f"epoch {texts['train/epoch']}",
            f"loss {texts['train/loss']}",
            f"{texts['speed/tokens_per_s']} {_SHORT[self._info.unit]}/s",
            *([f"{texts['sent']}/step"] if record.wire else []),
            *(["skipped"] if record.skipped else []),
        ]
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


def _evaluation(losses: Mapping[str, float]) -> list[str]:
    text = f"loss {format_loss(losses.get('loss'))}"
    if "loss_compressed" in losses:
        text += f", with compressed boundaries {format_loss(losses['loss_compressed'])}"
    scores = {name: value for name, value in losses.items() if not name.endswith("_compressed")}
    others = ", ".join(f"{name} {value}" for name, value in other_scores(scores))
    return [text, others] if others else [text]
