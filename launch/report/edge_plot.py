"""The rate of every connection between hosts over a run, as a PNG."""

from thinpipe.launch.report.edges import Traces
from thinpipe.launch.report.theme import LIGHT, Theme, new_figure, style, to_png

_MOST_LABELS = 12


def edges_png(traces: Traces, theme: Theme = LIGHT) -> bytes:
    """Mbit/s that left each host for each other; crosses where a connection was resumed."""
    figure = new_figure(3.4, theme)
    axes = figure.subplots()
    style(axes, "Mbit/s from machine to machine", theme)
    edges = {
        (source, sample["target"]): [s for s in samples if s["target"] == sample["target"]]
        for source, samples in traces.items()
        for sample in samples
    }
    for number, ((source, target), samples) in enumerate(edges.items()):
        color = theme.series[number % len(theme.series)]
        axes.plot(
            [sample["end_s"] for sample in samples],
            [8e-6 * sample["sent_Bps"] for sample in samples],
            color=color,
            linestyle=("-", "--", ":")[number // len(theme.series) % 3],
            linewidth=1.4,
            label=f"{source} \N{RIGHTWARDS ARROW} {target}" if number < _MOST_LABELS else None,
        )
        resumed = [sample["end_s"] for sample in samples if sample["resumed"]]
        places = axes.get_xaxis_transform()
        axes.plot(resumed, [0.03] * len(resumed), "x", transform=places, color=color)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds", color=theme.muted, fontsize=9, loc="right")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
    )
    return to_png(figure)
