"""Colours of all figures: the Okabe-Ito set, distinct for colour-blind readers."""

INK, GRID = "#1c2128", "#e3e6ea"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b8578a", "#8c6d00", "#3f9fd8")
