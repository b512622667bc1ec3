"""Table (Markdown) of the convergence benchmark; every seed needs its baseline."""

from collections.abc import Sequence

from benchmarks.harness import Row, summary

BASELINE = "fp32"
LOSSES = ("loss", "held out", "held out, compressed")
_COLUMNS = {
    "bits forward": ".2f",
    "bits backward": ".2f",
    "x fp32": ".1f",
    "x fp32, whole run": ".1f",
    "loss": ".4f",
    **{f"{name} gap": "+.4f" for name in LOSSES},
    "MB of epoch 1": ".1f",
    "MB of the last": ".1f",
    "change, epoch 2": ".3f",
    "change, last": ".3f",
}


def table(rows: Sequence[Row]) -> str:
    """Losses are in nats, of training in the last epoch; `gap` is to the baseline's.

    Bits are per value in all epochs but the first, headers included, and so is `x fp32`: how many
    times fewer bytes. Other metrics are those of held-out samples.
    """
    known = {*_COLUMNS, *LOSSES, "before"}
    scores = {name: ".3f" for row in rows for name in row.numbers if name not in known}
    return summary(rows, _COLUMNS | scores)
