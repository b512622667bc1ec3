"""Rates and delays of links, as people write them, and the links of so many hosts."""

import re

MIN_RATE_BPS = 8_000.0  # a frame takes 1.5 s
MAX_RATE_BPS = 30e9
"""tbf stores 32-bit bytes per second, and a core forwards about this much anyway."""
MAX_DELAY_S = 10.0  # what is under way is in the relay's RAM (lab/sandbox.py): at 1 Gbit/s 1.25 GB
MTU = 1500
FRAME_BYTES = MTU + 14
PAYLOAD_SHARE = 1448 / FRAME_BYTES
"""Share of a link's rate for TCP payload: the rest is Ethernet, IP and TCP headers."""

_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

Pair = tuple[int, int]


def links(hosts: int) -> list[Pair]:
    """Every (from, to)."""
    return [(i, j) for i in range(hosts) for j in range(hosts) if i != j]


def parse_rate(text: str, where: str = "rate") -> float | None:
    """`"100mbit"` in bit/s; `"none"` is no limit.

    Raises:
        ValueError: not a rate, or out of range; the message begins with `where`.
    """
    if text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]?)bit", text.strip().lower())
    if match is None:
        raise ValueError(f"{where} = {text!r}: not a rate; write 100mbit, 1.5gbit, 500kbit or none")
    return rate_in_range(float(match[1]) * _RATE_UNITS[match[2]], f"{where} = {text!r}")


def parse_time(text: str, where: str = "delay") -> float:
    """`"20ms"` in seconds.

    Raises:
        ValueError: not a time, or out of range; the message begins with `where`.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(us|ms|s)", text.strip().lower())
    if match is None:
        raise ValueError(f"{where} = {text!r}: not a time; write 20ms, 0.5s or 300us")
    return delay_in_range(float(match[1]) * _TIME_UNITS[match[2]], f"{where} = {text!r}")


def format_rate(bps: float | None) -> str:
    """`"100 Mbit/s"`."""
    if bps is None:
        return "unlimited"
    factor, unit = next((f, u) for f, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if bps >= f)
    return f"{bps / factor:.4g} {unit}bit/s"


def rate_in_range(bps: float, where: str) -> float:
    """The rate, if a link can have it; else a ValueError that begins with `where`."""
    if not MIN_RATE_BPS <= bps <= MAX_RATE_BPS:
        raise ValueError(f"{where}: use 8kbit to 30gbit, or none for no limit")
    return bps


def delay_in_range(seconds: float, where: str) -> float:
    """The same for a delay."""
    if not 0 <= seconds <= MAX_DELAY_S:
        raise ValueError(f"{where}: use 0s to {MAX_DELAY_S:g}s")
    return seconds
