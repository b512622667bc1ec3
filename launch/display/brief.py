"""The numbers of the panel in few lines: values beside their labels, a line for each cut."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
from thinpipe.pipeline.wire.header import DIRECTIONS

_COLUMNS = 4


def brief_numbers(info: RunInfo, record: StepRecord, progress: RunningValues) -> Table:
    """All metrics of a step, labels beside values."""
    evaluation = progress.eval or {}
    grad_norm = NOTHING if record.grad_norm is None else f"{record.grad_norm:.3g}"
    pairs = [
        (f"{info.unit}s/s", format_speed(record.tokens_per_s)),
        ("bubble", f"{record.bubble:.1%}"),
        ("epoch", str(record.epoch)),
        ("step time", format_duration(record.step_s)),
        ("loss", format_loss(record.loss)),
        (f"mean of {LOSS_STEPS}", format_loss(progress.mean_loss)),
        ("eval", format_loss(evaluation.get("loss"))),
        ("compressed", format_loss(evaluation.get("loss_compressed"))),
        ("grad norm", grad_norm),
        ("lr", f"{record.lr:.2e}"),
        ("skipped", str(progress.skipped)),
        ("replicas", format_bytes(record.sync_bytes)),
        ("activations", format_bytes(record.sent("forward"))),
        ("gradients", format_bytes(record.sent("backward"))),
        ("control", format_bytes(record.control_bytes)),
    ]
    if record.weight_bytes or record.gradient_bytes:
        pairs.append(("weights", format_bytes(record.weight_bytes)))
        pairs.append(("weight grads", format_bytes(record.gradient_bytes)))
    pairs += [(f"eval {name}", value) for name, value in other_scores(evaluation)]
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(_COLUMNS):
        grid.add_column()
    cells = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in pairs]
    for start in range(0, len(cells), _COLUMNS):
        grid.add_row(*cells[start : start + _COLUMNS])
    return grid


def brief_traffic(info: RunInfo, record: StepRecord, cuts: int) -> RenderableType:
    """A line for each of the first `cuts` cuts, both directions beside each other, and for all."""
    if not info.cuts:
        return Text("one stage, so no cuts", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, header_style="dim")
    table.add_column("cut")
    for direction in DIRECTIONS:
        for header in (f"{direction}/step", "Mbit/s", "vs bf16", "error"):
            table.add_column(header, justify="right", no_wrap=True)
    sent = {(count.cut, count.direction): count for count in record.wire}
    for cut in info.cuts[:cuts]:
        cells = []
        for direction in DIRECTIONS:
            count = sent.get((cut, direction))
            nbytes, values = (count.nbytes, count.values) if count else (0, 0)
            cells += [
                format_bytes(nbytes),
                record.mbps(nbytes),
                format_ratio(2 * values / nbytes if nbytes else None),
                format_share(count.error if count else None),
            ]
        table.add_row(str(cut), *cells)
    totals = []
    for direction in DIRECTIONS:
        nbytes = record.sent(direction)
        totals += [format_bytes(nbytes), record.mbps(nbytes), "", ""]
    table.add_row("all", *totals, style="bold")
    left = len(info.cuts) - cuts
    more = [Text(f"and {left} more cuts, on a taller terminal", style="dim")] if left else []
    return Group(_methods(info), table, *more)


def _methods(info: RunInfo) -> Text:
    """How each direction is compressed, cuts named where they differ."""
    parts = []
    for direction in DIRECTIONS:
        by_method: dict[str, list[str]] = {}
        for cut in info.cuts:
            by_method.setdefault(info.method((cut, direction)), []).append(str(cut))
        named = (
            f"{method} (cut {', '.join(found)})" if len(by_method) > 1 else method
            for method, found in by_method.items()
        )
        parts.append(f"{direction} {', '.join(named)}")
    return Text("; ".join(parts), style="dim")
