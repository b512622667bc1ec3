"""What a run leaves behind: `summary.json`, `loss.png` and `report.html`.

The page is one file that loads nothing else: its pictures are inlined, once for light and once for
dark surroundings, and the reader's browser picks.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import TypedDict

from launch.metrics import (
    NOTHING,
    Direction,
    RunInfo,
    StepRecord,
    TimelineEvent,
    WireKey,
    format_bytes,
    format_count,
    format_duration,
    format_healed,
    format_loss,
    format_rate,
    format_ratio,
    other_scores,
)
from launch.plots import (
    DARK,
    LIGHT,
    Theme,
    bytes_png,
    loss_png,
    overview_png,
    signal_png,
    timeline_png,
)


class Traffic(TypedDict):
    """Bytes really sent, headers included, beside what the same values take uncompressed.

    A ratio says how many times fewer bytes were sent; it is None if none were.
    """

    bytes: int
    messages: int
    bf16_bytes: int
    fp32_bytes: int
    ratio_bf16: float | None
    ratio_fp32: float | None


class WireTraffic(Traffic):
    """The traffic of one cut in one direction over the whole run."""

    cut: int
    direction: Direction
    method: str


class Summary(TypedDict):
    """A run in numbers that JSON can hold: what is not finite is None.

    `final_loss` is the mean over the last epoch's steps, `first_loss` that of the first step that
    has one. `eval` is the last evaluation. `sync_ratio_fp32` says how many times fewer bytes went
    between replicas than ring all-reduces of fp32 gradients take, one per step. `healed` counts, by
    cut, samples that both ends had to forget. `wall_s` adds up the steps, without start-up and
    evaluations. `unit` is what `tokens` count: the token, or the sample that is classified.
    """

    name: str
    stages: int
    replicas: int
    schedule: str
    microbatches: int
    parameters: int
    steps: int
    epochs: int
    tokens: int
    unit: str
    first_loss: float | None
    final_loss: float | None
    eval: dict[str, float | None] | None
    median_tokens_per_s: float
    median_step_s: float
    mean_bubble: float
    wire: list[WireTraffic]
    totals: Traffic
    sync_bytes: int
    sync_ratio_fp32: float | None
    control_bytes: int
    healed: dict[str, int]
    skipped: int
    wall_s: float
    machine: str
    versions: dict[str, str]
    config_digest: str


def summarize(info: RunInfo, records: Sequence[StepRecord]) -> Summary:
    """Condense the steps of a run.

    Raises:
        ValueError: there are no steps, or a step counts a cut that the run does not have.
    """
    _check(info, records)
    wire = [_wire_traffic(info, records, key) for key in info.wire_keys()]
    last_epoch = [record.loss for record in records if record.epoch == records[-1].epoch]
    evaluations = [record.eval for record in records if record.eval is not None]
    return Summary(
        name=info.name,
        stages=info.stages,
        replicas=info.replicas,
        schedule=info.schedule,
        microbatches=info.microbatches,
        parameters=info.parameters,
        steps=len(records),
        epochs=len({record.epoch for record in records}),
        tokens=sum(record.tokens for record in records),
        unit=info.unit,
        first_loss=next((r.loss for r in records if math.isfinite(r.loss)), None),
        final_loss=_mean_of_finite(last_epoch),
        eval={k: _finite(v) for k, v in evaluations[-1].items()} if evaluations else None,
        median_tokens_per_s=median(record.tokens_per_s for record in records),
        median_step_s=median(record.step_s for record in records),
        mean_bubble=fmean(record.bubble for record in records),
        wire=wire,
        totals=_traffic(
            sum(row["bytes"] for row in wire),
            messages=sum(row["messages"] for row in wire),
            values=sum(row["bf16_bytes"] for row in wire) // 2,
        ),
        sync_bytes=sum(record.sync_bytes for record in records),
        sync_ratio_fp32=_sync_ratio(info, records),
        control_bytes=sum(record.control_bytes for record in records),
        healed={
            str(cut): total
            for cut in info.cuts
            if (total := sum(record.healed.get(cut, 0) for record in records))
        },
        skipped=sum(record.skipped for record in records),
        wall_s=sum(record.step_s for record in records),
        machine=info.machine,
        versions=dict(info.versions),
        config_digest=info.config_digest,
    )


def _check(info: RunInfo, records: Sequence[StepRecord]) -> None:
    if not records:
        raise ValueError(f"{info.folder}: no step was recorded; train at least one step to report")
    for record in records:
        for count in record.wire:
            if count.cut not in info.cuts:
                raise ValueError(
                    f"{info.folder}: step {record.step} sent over cut {count.cut}, but the run has "
                    f"cuts {list(info.cuts)}; report it with the configuration it was trained with"
                )


def _sync_ratio(info: RunInfo, records: Sequence[StepRecord]) -> float | None:
    sent = sum(record.sync_bytes for record in records)
    ring = 4 * 2 * (info.replicas - 1) * info.exchanged * len(records)
    return ring / sent if sent and ring else None


def _direction_bytes(summary: Summary, direction: Direction) -> int:
    """Activations (forward) or their gradients (backward) of all cuts."""
    return sum(row["bytes"] for row in summary["wire"] if row["direction"] == direction)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean_of_finite(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def _wire_traffic(info: RunInfo, records: Sequence[StepRecord], key: WireKey) -> WireTraffic:
    counts = [
        count for record in records for count in record.wire if (count.cut, count.direction) == key
    ]
    traffic = _traffic(
        sum(count.bytes for count in counts),
        messages=sum(count.messages for count in counts),
        values=sum(count.values for count in counts),
    )
    return WireTraffic(cut=key[0], direction=key[1], method=info.methods[key], **traffic)


def _traffic(nbytes: int, *, messages: int, values: int) -> Traffic:
    return Traffic(
        bytes=nbytes,
        messages=messages,
        bf16_bytes=2 * values,
        fp32_bytes=4 * values,
        ratio_bf16=2 * values / nbytes if nbytes else None,
        ratio_fp32=4 * values / nbytes if nbytes else None,
    )


def write_report(
    folder: Path,
    info: RunInfo,
    *,
    records: Sequence[StepRecord],
    timeline: Sequence[TimelineEvent],
    summary: Summary,
) -> Path:
    """Write the three files into `folder`, which is made if missing; return the page's path.

    `timeline` holds the events of one step and may be empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=2, allow_nan=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (folder / "loss.png").write_bytes(overview_png(info, records))
    page = folder / "report.html"
    page.write_text(_page(info, records, timeline=timeline, summary=summary), encoding="utf-8")
    return page


_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff; --ink: #1c2128;
  --muted: #5b6570; --line: #e3e6ea; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #171b21; --ink: #e8ebef;
  --muted: #a0a9b4; --line: #2c333c; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; margin: .4rem 0 1rem; }
.muted, dt, th, .card span { color: var(--muted); }
.cards { display: grid; gap: .75rem; margin: 1.5rem 0;
  grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); }
.card, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: .8rem 1rem; }
.card span { display: block; font-size: .82rem; }
.card strong { font-size: 1.45rem; font-variant-numeric: tabular-nums; }
.panel { padding: 1rem; overflow-x: auto; }
img { display: block; width: 100%; height: auto; }
table { width: 100%; border-collapse: collapse; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th { font-weight: 500; text-align: left; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
tfoot td { font-weight: 600; border-bottom: 0; }
.n { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.5rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
"""

_LOSS_WORDS = """The loss says how surprised the model is by the right answer (the next token, or a
sample's label); lower is better. The thin line is every training step, the thick one their local
mean. Discs are evaluations on text the model was not trained on, measured with uncompressed
boundaries; open diamonds are the same evaluation with compressed boundaries: sent as a sample's
first visit is, since held-out text has been seen by no memory. Where the two meet, that compression
does not disturb the model's predictions. A cross at the bottom marks a step whose update was
skipped."""

_BYTES_WORDS = """A cut is a place where one stage hands its activations to the next (forward) and
gets gradients back (backward); it is named by the first layer after it. The dotted lines show what
the same values would take as bf16 or fp32; the scale is logarithmic, so equal distances are equal
ratios."""

_AQSGD_WORDS = """AQ-SGD sends a sample's activations in full on the first visit, and afterwards
only their small change since the last visit: the curve falls once the first epoch is over."""

_TIMELINE_WORDS = """Each lane is one rank, time runs to the right, and the number in a box is its
microbatch. Forwards travel down the stages and backwards come up again. Bare or hatched lane is
the bubble: time in which the rank had nothing to compute, because its neighbours or the network
were not ready. More microbatches, a better schedule or smaller messages shrink it. Where a rank
holds several stages, the later ones are paler."""


def _page(
    info: RunInfo,
    records: Sequence[StepRecord],
    *,
    timeline: Sequence[TimelineEvent],
    summary: Summary,
) -> str:
    title = escape(info.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - ThinPipe report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="muted">{_subtitle(summary)}</p>
{_cards(summary)}
<h2>Loss</h2>
<p>{_LOSS_WORDS}</p>
{_picture("Training and evaluation loss by step", lambda theme: loss_png(records, theme))}
{_wire_section(info, records, summary)}
{_timeline_section(timeline)}
<h2>How it ran</h2>
{_details(summary)}
</body>
</html>
"""


def _subtitle(summary: Summary) -> str:
    parts = (
        f"{format_count(summary['parameters'])} parameters",
        f"stages: {summary['stages']}",
        f"replicas: {summary['replicas']}",
        f"schedule: {summary['schedule']}",
        f"microbatches: {summary['microbatches']}",
        f"epochs: {summary['epochs']}",
    )
    return escape(" \N{MIDDLE DOT} ".join(parts))


def _cards(summary: Summary) -> str:
    losses, totals = summary["eval"] or {}, summary["totals"]
    unit = summary["unit"].capitalize()
    cards = [
        ("Training loss, last epoch", format_loss(summary["final_loss"])),
        ("Evaluation loss", format_loss(losses.get("loss"))),
        ("Evaluation loss, compressed", format_loss(losses.get("loss_compressed"))),
        *((f"Evaluation {name}", value) for name, value in other_scores(losses)),
        (
            f"{unit}s per second, median",
            format_rate(summary["median_tokens_per_s"]),
        ),
        ("Sent over the cuts", format_bytes(totals["bytes"])),
        ("Fewer bytes than bf16", format_ratio(totals["ratio_bf16"])),
        ("Bubble, mean", f"{summary['mean_bubble']:.1%}"),
        ("Time in steps", format_duration(summary["wall_s"])),
    ]
    divs = "\n".join(
        f'<div class="card"><span>{label}</span><strong>{value}</strong></div>'
        for label, value in cards
        if value != NOTHING
    )
    return f'<div class="cards">\n{divs}\n</div>'


def _picture(alt: str, draw: Callable[[Theme], bytes]) -> str:
    """The picture in both themes; the browser shows the one that suits the reader."""
    light, dark = (base64.b64encode(draw(theme)).decode("ascii") for theme in (LIGHT, DARK))
    return (
        '<div class="panel"><picture>'
        '<source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{light}"></picture></div>'
    )


def _wire_section(info: RunInfo, records: Sequence[StepRecord], summary: Summary) -> str:
    if not summary["wire"]:
        return "<h2>Traffic</h2>\n<p>The model ran as one stage: nothing crossed a cut.</p>"
    picture = _picture(
        "Bytes sent per step over each cut", lambda theme: bytes_png(info, records, theme)
    )
    aqsgd = any(row["method"].startswith("aqsgd") for row in summary["wire"])
    return f"""<h2>Bytes per step</h2>
<p>{_BYTES_WORDS} {_AQSGD_WORDS if aqsgd else ""}</p>
{picture}
{_signal_section(records)}<h2>Traffic of the whole run</h2>
<p>Sent counts every byte handed to the network, message headers included. The ratios say how many
times fewer bytes that is than the same values uncompressed.</p>
{_wire_table(summary)}"""


def _signal_section(records: Sequence[StepRecord]) -> str:
    if all(count.error is None for record in records for count in record.wire):
        return ""
    picture = _picture(
        "Relative error and change by step", lambda theme: signal_png(records, theme)
    )
    return f"""<h2>What compression changes</h2>
<p>Measured at the sender on a sample per step: how far what arrives is from what was sent, and how
far activations have moved since the last visit of their sample. Changes that grow are a bad
sign.</p>
{picture}
"""


def _wire_table(summary: Summary) -> str:
    heads = "".join(f"<th>{name}</th>" for name in ("Cut", "Direction", "Method"))
    numbers = ("Messages", "Sent", "As bf16", "Ratio", "As fp32", "Ratio")
    heads += "".join(f'<th class="n">{name}</th>' for name in numbers)
    rows = "\n".join(
        f"<tr><td>{row['cut']}</td><td>{row['direction']}</td><td>{escape(row['method'])}</td>"
        f"{_amounts(row)}</tr>"
        for row in summary["wire"]
    )
    return f"""<div class="panel"><table>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
<tfoot><tr><td colspan="3">All cuts</td>{_amounts(summary["totals"])}</tr></tfoot>
</table></div>"""


def _amounts(row: Traffic) -> str:
    """Table cells for people; the exact number of bytes is in each cell's `value`."""
    cells = (
        f"{row['messages']:,}",
        _bytes_cell(row["bytes"]),
        _bytes_cell(row["bf16_bytes"]),
        format_ratio(row["ratio_bf16"]),
        _bytes_cell(row["fp32_bytes"]),
        format_ratio(row["ratio_fp32"]),
    )
    return "".join(f'<td class="n">{cell}</td>' for cell in cells)


def _bytes_cell(nbytes: int) -> str:
    return f'<data value="{nbytes}" title="{nbytes:,} bytes">{format_bytes(nbytes)}</data>'


def _timeline_section(timeline: Sequence[TimelineEvent]) -> str:
    if not timeline:
        return "<h2>Timeline of one step</h2>\n<p>No timeline was recorded in this run.</p>"
    picture = _picture("What each rank did during one step", lambda t: timeline_png(timeline, t))
    return f"<h2>Timeline of one step</h2>\n<p>{_TIMELINE_WORDS}</p>\n{picture}"


def _details(summary: Summary) -> str:
    rows: Mapping[str, str] = {
        "Steps": f"{summary['steps']:,} ({summary['skipped']:,} skipped)",
        f"{summary['unit'].capitalize()}s": f"{summary['tokens']:,}",
        "Step time, median": format_duration(summary["median_step_s"]),
        "Loss of the first step": format_loss(summary["first_loss"]),
        "Activations": _bytes_cell(_direction_bytes(summary, "forward")),
        "Activation gradients": _bytes_cell(_direction_bytes(summary, "backward")),
        "Sent between replicas": _bytes_cell(summary["sync_bytes"]),
        "Fewer than fp32 all-reduce": format_ratio(summary["sync_ratio_fp32"]),
        "Control messages": _bytes_cell(summary["control_bytes"]),
        "Memories healed": format_healed(summary["healed"]),
        "Machine": escape(summary["machine"]),
        "Versions": escape(", ".join(f"{k} {v}" for k, v in summary["versions"].items())),
        "Configuration digest": f"<code>{escape(summary['config_digest'])}</code>",
    }
    items = "\n".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows.items())
    return f'<div class="panel"><dl>\n{items}\n</dl></div>'
