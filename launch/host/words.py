"""How numbers are written everywhere. Bytes are decimal (1 MB = 1e6 B), like the rates of links.

This imports nothing of ours.
"""

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

WireKey: TypeAlias = tuple[int, Literal["forward", "backward"]]
"""One direction of one cut. A cut is named by the first layer after it."""

NOTHING = "-"
"""Shown where there is no number."""

_TIMES = "\N{MULTIPLICATION SIGN}"


def format_bytes(nbytes: float) -> str:
    """Three digits and a decimal unit: 512 B, 12.3 kB, 4.56 MB."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """Three digits and a decimal prefix: 950, 12.3 k, 124 M."""
    return _scaled(count, ("", "k", "M", "G", "T")).rstrip()


def _scaled(value: float, units: tuple[str, ...]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value /= 1000
        power += 1
    digits = 0 if not power or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}"


def format_round_trip(seconds: float) -> str:
    """Milliseconds; on one machine there is hardly any."""
    return f"{1e3 * seconds:.1f} ms" if seconds >= 5e-5 else "<0.1 ms"


def format_ratio(ratio: float | None) -> str:
    """Compression ratio: 7.9x, with a real multiplication sign; "-" if unknown."""
    if ratio is None:
        return NOTHING
    return f"{ratio:.{1 if ratio < 99.95 else 0}f}{_TIMES}"


def format_share(share: float | None) -> str:
    """A part of a whole in percent, to one decimal; "-" if unknown."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def format_loss(loss: float | None) -> str:
    """Four decimals; "-" if there is none or it is not finite."""
    return f"{loss:.4f}" if loss is not None and math.isfinite(loss) else NOTHING


def format_repaired(repaired: Mapping[int, int] | Mapping[str, int]) -> str:
    """Samples whose cache entries were reset, by cut: 3 samples at cut 6; or "none"."""
    listed = (f"{n:,} sample{'s' * (n != 1)} at cut {cut}" for cut, n in repaired.items())
    return ", ".join(listed) or "none"


def format_speed(per_s: float) -> str:
    """A rate per second, whole from 100 on and with thousands separated: 8.25, 12,431."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def format_duration(duration_s: float) -> str:
    """Three digits or two units: 850 ms, 1.27 s, 42 s, 6 min 23 s, 2 h 05 min."""
    if duration_s < 0.9995:
        return f"{1e3 * duration_s:.3g} ms"
    if duration_s < 9.995:
        return f"{duration_s:.3g} s"
    whole_s = round(duration_s)
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    return f"{whole_s // 3600} h {whole_s % 3600 // 60:02d} min"
