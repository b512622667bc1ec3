"""Common style of all plots: colours, size and frame.

Colours come from the Okabe-Ito set, which stays distinct for colour-blind readers; line
style, hatching or text distinguishes curves too. Figures are built without pyplot, so nothing
global changes.
"""

import io
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_WIDTH_IN = 9.0
_DPI = 150


@dataclass(frozen=True)
class Theme:
    """Colours of a plot: background, text, secondary text, lines, and data."""

    surface: str
    ink: str
    muted: str
    grid: str
    idle: str
    faint: str  # the hatching of a wait
    series: tuple[str, ...]


LIGHT = Theme(
    surface="#ffffff",
    ink="#1c2128",
    muted="#5b6570",
    grid="#e3e6ea",
    idle="#eceef1",
    faint="#b3bac3",
    series=("#0072b2", "#d55e00", "#009e73", "#b8578a", "#8c6d00", "#3f9fd8"),
)
DARK = Theme(
    surface="#171b21",
    ink="#e8ebef",
    muted="#a0a9b4",
    grid="#2c333c",
    idle="#262c34",
    faint="#5a6470",
    series=("#56b4e9", "#f08a4b", "#2fc597", "#dd94bd", "#e6c84a", "#8fa8ff"),
)


def new_figure(height_in: float, theme: Theme) -> Figure:
    """An empty figure, 9 inches wide."""
    return Figure(
        figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor=theme.surface, layout="constrained"
    )


def to_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def style(axes: Axes, title: str, theme: Theme, *, title_pad: float = 18) -> None:
    """Set title, colours and a horizontal grid."""
    axes.set_title(
        title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=title_pad
    )
    axes.set_facecolor(theme.surface)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.muted)
    axes.tick_params(which="both", length=0, colors=theme.muted, labelsize=9)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
