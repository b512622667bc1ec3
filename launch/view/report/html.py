"""The report of a run: `summary.json`, `edges.json` (several machines), `report.html`.

The page is self-contained: charts are SVG in the page's own colours, with values under the pointer.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from thinpipe.launch.host import disk
from thinpipe.launch.host.words import NOTHING, format_bytes
from thinpipe.launch.view.report.charts import bytes_chart, edges_chart, error_chart, loss_chart
from thinpipe.launch.view.report.edges import Traces, edge_cells, write_traces
from thinpipe.launch.view.report.metric_table import (
    LOSSES,
    SHARDS,
    SPEED,
    TRAFFIC,
    other_scores,
    shown,
)
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import Summary, Traffic, WireTraffic, traffic_cells
from thinpipe.launch.view.report.svg import SCRIPT, STYLE
from thinpipe.launch.view.report.timeline_chart import timeline_svg
from thinpipe.pipeline.comm.error_stats import MASSIVE
from thinpipe.pipeline.stage import ComputeEvent


def write_report(
    folder: Path,
    info: RunInfo,
    *,
    records: Sequence[StepRecord],
    timeline: Sequence[ComputeEvent],
    summary: Summary,
    traces: Traces | None = None,
) -> Path:
    """Write the files into `folder`, created if missing; return the page's path.

    `timeline` holds the events of one step and may be empty, as may `traces`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=2, allow_nan=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    if traces:
        write_traces(folder, traces)
    page = folder / "report.html"
    text = _page(info, records, timeline=timeline, traces=traces or {}, summary=summary)
    partial = page.with_name(".report.html.partial")
    partial.write_text(text, encoding="utf-8")
    disk.replace(partial, page)  # whoever looks at it during the run sees a whole page
    return page


_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff; --ink: #1c2128;
  --muted: #5b6570; --line: #e3e6ea; --accent: #0072b2; --c0: #0072b2; --c1: #d55e00;
  --c2: #009e73; --c3: #b8578a; --c4: #8c6d00; --c5: #3f9fd8; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #171b21; --ink: #e8ebef;
  --muted: #a0a9b4; --line: #2c333c; --accent: #56b4e9; --c0: #56b4e9; --c1: #f08a4b;
  --c2: #2fc597; --c3: #dd94bd; --c4: #e6c84a; --c5: #8fa8ff; } }
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
table { width: 100%; border-collapse: collapse; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th { font-weight: 500; text-align: left; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
tfoot td { font-weight: 600; border-bottom: 0; }
.n { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.5rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 30rem) { body { padding: 1.2rem .7rem 3rem; } .panel { padding: .7rem; }
  .cards { grid-template-columns: 1fr 1fr; } .card { padding: .6rem .7rem; }
  .card strong { font-size: 1.15rem; }
  th, td { padding: .4rem .3rem; } :is(th, td):first-child { white-space: normal; } }
"""

_LOSS_TEXT = """Cross-entropy of the next token, or of a sample's label; lower is better. The thin
line is every training step, the thick one a running mean. Dots are evaluations on held-out text
with uncompressed boundaries; open diamonds are the same evaluation with compressed boundaries,
where every sample is in its first epoch. Where the two coincide, this compression does not
change the model's predictions. Point at a chart for the values of a step."""

_BYTES_TEXT = """At a cut, a stage sends activations to the next one (forward) and receives their
gradients (backward); a cut is named by the first layer after it. The dotted lines are the same
values as bf16 or fp32; the scale is logarithmic, so equal distances are equal ratios."""

_MASSIVE_TEXT = f"""Massive tokens of a sample have over {MASSIVE:.0f} times the energy of its
median token. Channels are measured without them, all values with them."""
_GAIN = "Coding gain, bits per value"
_GAIN_TEXT = """ The coding gain is what a learned basis saves at the same step, against one
distribution for all values; below half a bit, it is not used."""
_AQSGD_TEXT = """AQ-SGD sends a sample's activations in the first epoch, and then only their
change since the previous epoch: the curve falls after the first."""

_TIMELINE_TEXT = """One row per rank, time to the right; the number in a box is the microbatch.
Empty and hatched parts are the bubble: the rank was idle or waited for a message. More
microbatches, a better schedule or smaller messages reduce it. If a rank has several stages, later
ones are paler."""

_EDGES_TEXT = """What left each machine for another, with all that encryption, framing and
repetition add, and with evaluations, whose activations are not compressed. A diamond marks a
connection that broke and was resumed: nothing was lost. Long silences, and segments that TCP had to
send again, are signs of a bad or overloaded network."""


def _page(
    info: RunInfo,
    records: Sequence[StepRecord],
    *,
    timeline: Sequence[ComputeEvent],
    traces: Traces,
    summary: Summary,
) -> str:
    done, total = records[-1].step, info.total_steps
    state = "" if done >= total else f"<p>So far: step {done:,} of {total:,}.</p>"
    return page(
        f"{info.name} - ThinPipe report",
        f"""<h1>{escape(info.name)}</h1>
<p class="muted">{_subtitle(summary, info)}</p>
{state}
{_cards(summary)}
<h2>Loss</h2>
<p>{_LOSS_TEXT}</p>
{panel(loss_chart(records).svg())}
{_wire_section(info, records, summary)}
{_timeline_section(timeline)}
{_edge_section(traces, summary)}
<h2>Details</h2>
{_details(summary)}""",
    )


def page(title: str, body: str) -> str:
    """A whole page with the style of reports."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}{STYLE}</style>
</head>
<body>
{body}
<script>{SCRIPT}</script>
</body>
</html>
"""


def panel(content: str) -> str:
    """A box of the page."""
    return f'<div class="panel">{content}</div>'


def _subtitle(summary: Summary, info: RunInfo) -> str:
    parts = (*info.shape, f"{summary['epochs']} epochs")
    return escape(" \N{MIDDLE DOT} ".join(parts))


def _cards(summary: Summary) -> str:
    keys = (*LOSSES, *SPEED, "sent", "ratio_bf16", "wall_s")
    cards = shown(keys, summary, unit=summary["unit"], long=True)
    cards += [(f"Evaluation {name}", value) for name, value in other_scores(summary["eval"] or {})]
    divs = "\n".join(
        f'<div class="card"><span>{label}</span><strong>{value}</strong></div>'
        for label, value in cards
        if value != NOTHING
    )
    return f'<div class="cards">\n{divs}\n</div>'


def _wire_section(info: RunInfo, records: Sequence[StepRecord], summary: Summary) -> str:
    if not summary["wire"]:
        return "<h2>Traffic</h2>\n<p>The model ran as one stage, so there are no cuts.</p>"
    picture = panel(bytes_chart(info, records).svg())
    aqsgd = any(row["method"].startswith("aqsgd") for row in summary["wire"])
    return f"""<h2>Bytes per step</h2>
<p>{_BYTES_TEXT} {_AQSGD_TEXT if aqsgd else ""}</p>
{picture}
{_error_section(records, summary)}<h2>Traffic of the whole run</h2>
<p>"Sent" includes message headers. Ratios are relative to the same values uncompressed.</p>
{_wire_table(summary)}"""


def _error_section(records: Sequence[StepRecord], summary: Summary) -> str:
    if all(count.error is None for record in records for count in record.wire):
        return ""
    picture = panel(error_chart(records).svg())
    return f"""<h2>Compression error</h2>
<p>Measured at the sender on one sample per step: the error of each channel, and its change since
the previous epoch of the sample, relative to the channel's own size. Shown is the median channel.
Changes that grow are a bad sign.</p>
{picture}
{_measured_table(summary)}"""


def _measured_table(summary: Summary) -> str:
    """Means over the last epoch; columns that nothing was measured for are left out."""
    columns: dict[str, Callable[[WireTraffic], str]] = {
        "Error": lambda row: _number(row["channel_error"]),
        "Worst channel": lambda row: _channel(row["worst_channel"], row["worst_error"], "{:.3g}"),
        "Error of all values": lambda row: _number(row["error"]),
        "Change": lambda row: _number(row["channel_change"]),
        "Change of all values": lambda row: _number(row["change"]),
        "Cosine to the last epoch": lambda row: _number(row["cosine"]),
        "Largest channel": lambda row: _channel(
            row["largest_channel"], row["largest_share"], "{:.0%} of the energy"
        ),
        "Massive tokens": lambda row: _number(row["massive_tokens"]),
        _GAIN: lambda row: _number(row["gain"]),
        "Dimensions for 95 %": lambda row: _number(row["dimensions"]),
    }
    cells = {name: [show(row) for row in summary["wire"]] for name, show in columns.items()}
    shown = {name: column for name, column in cells.items() if set(column) != {NOTHING}}
    rows = [
        [str(row["cut"]), row["direction"], *(column[i] for column in shown.values())]
        for i, row in enumerate(summary["wire"])
    ]
    text = _GAIN_TEXT if _GAIN in shown else ""
    return f"""<p>Means over the last epoch. {_MASSIVE_TEXT}{text}</p>
{table(("Cut", "Direction"), tuple(shown), rows)}
"""


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"


def _channel(number: int | None, value: float | None, form: str) -> str:
    return NOTHING if number is None or value is None else f"{number}: {form.format(value)}"


def _wire_table(summary: Summary) -> str:
    numbers = ("Messages", "Sent", "As bf16", "Ratio", "As fp32", "Ratio")
    rows = [
        [str(row["cut"]), row["direction"], escape(row["method"]), *_amounts(row)]
        for row in summary["wire"]
    ]
    total = ["All cuts", "", "", *_amounts(summary["totals"])]
    return table(("Cut", "Direction", "Method"), numbers, rows, total)


def table(
    texts: Sequence[str],
    numbers: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] = (),
) -> str:
    """A table as HTML, of cells as HTML: columns of text, then of numbers."""

    def line(cells: Sequence[str], kind: str) -> str:
        left = "".join(f"<{kind}>{cell}</{kind}>" for cell in cells[: len(texts)])
        right = "".join(f'<{kind} class="n">{cell}</{kind}>' for cell in cells[len(texts) :])
        return f"<tr>{left}{right}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    foot = f"\n<tfoot>{line(total, 'td')}</tfoot>" if total else ""
    return f"""<div class="panel"><table>
<thead>{line([*texts, *numbers], "th")}</thead>
<tbody>
{body}
</tbody>{foot}
</table></div>"""


def _amounts(row: Traffic) -> list[str]:
    """Rounded numbers; the exact bytes are in each cell's `value`."""
    return traffic_cells(row, _bytes_cell)


def _bytes_cell(nbytes: int) -> str:
    return f'<data value="{nbytes}" title="{nbytes:,} bytes">{format_bytes(nbytes)}</data>'


def _timeline_section(timeline: Sequence[ComputeEvent]) -> str:
    if not timeline:
        return "<h2>Timeline of one step</h2>\n<p>No timeline was recorded in this run.</p>"
    picture = panel(timeline_svg(timeline))
    return f"<h2>Timeline of one step</h2>\n<p>{_TIMELINE_TEXT}</p>\n{picture}"


def _edge_section(traces: Traces, summary: Summary) -> str:
    if not summary["edges"]:
        return ""
    numbers = ("Sent", "Mbit/s, mean", "Round trip", "Sent again", "Resumed", "Longest silence")
    rows = [[escape(cell) for cell in edge_cells(edge)] for edge in summary["edges"]]
    for row, edge in zip(rows, summary["edges"], strict=True):
        row[2] = _bytes_cell(edge["bytes"])
    picture = panel(edges_chart(traces).svg()) if any(traces.values()) else ""
    return f"""<h2>Connections between machines</h2>
<p>{_EDGES_TEXT}</p>
{picture}
{table(("From", "To"), numbers, rows)}"""


def _details(summary: Summary) -> str:
    keys = ("steps", "train/skipped", "tokens", "speed/step_s", "first_loss", *TRAFFIC)
    keys += ("ratio_fp32", *(SHARDS if summary["shards"] > 1 else ()), "repaired")
    rows = [
        *shown(keys, summary, unit=summary["unit"], long=True, show_bytes=_bytes_cell),
        ("Machine", escape(summary["machine"])),
        ("Versions", escape(", ".join(f"{k} {v}" for k, v in summary["versions"].items()))),
        ("Configuration digest", f"<code>{escape(summary['config_digest'])}</code>"),
    ]
    items = "\n".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows)
    return f'<div class="panel"><dl>\n{items}\n</dl></div>'
